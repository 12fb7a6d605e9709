"""Programs that try to harm what is outside, to learn the answer, or to be called right without knowing it.

Each defines ``solve(x)``; the right answer is a secret that stands in a file, in the environment and in the memory of
the process that asks. FOLDER, PORT and PID stand for the folder with that file (``secret.txt``, and ``victim.txt``;
anyone may write to both), a listening port, and the asking process. ``found`` looks for the secret in a text.
"""

from __future__ import annotations

from textwrap import dedent

MODULES = ("_socket", "_thread", "importlib.machinery", "mmap", "resource", "subprocess", "threading")
"""To be preloaded, so that these programs meet with the walls and not with a module that is not there."""

_COMMON = """
import builtins, ctypes, gc, json, os, re, signal, sys, time
def found(text):
    match = re.search("secret-" "[0-9a-f]{32}", str(text))
    return match[0] if match else "nothing"
libc = ctypes.CDLL(None, use_errno=True)
"""


def source(body: str, folder: str, port: int, pid: int) -> str:
    filled = dedent(body).replace("FOLDER", folder).replace("PORT", str(port)).replace("PID", str(pid))
    return _COMMON + filled


def _solve(*lines: str) -> str:
    return "def solve(x):\n" + "".join(f"    {line}\n" for line in lines)


FILES = {
    "read a file": _solve("return found(open('FOLDER/secret.txt').read())"),
    "read by descriptor": _solve("return found(os.read(os.open('FOLDER/secret.txt', 0), 999))"),
    "read through C": _solve(
        "libc.fopen.restype = ctypes.c_void_p",
        "file = libc.fopen(b'FOLDER/secret.txt', b'r')",
        "buffer = ctypes.create_string_buffer(200)",
        "libc.fread(buffer, 1, 199, ctypes.c_void_p(file)) if file else None",
        "return found(buffer.value)",
    ),
    "close a descriptor, then open": _solve("os.closerange(0, 99)", "return found(open('FOLDER/secret.txt').read())"),
    "climb out of the root": _solve("return found(open('../' * 20 + 'FOLDER/secret.txt').read())"),
    "write a new file": _solve("open('FOLDER/new.txt', 'w').write('x')"),
    "write an old file": _solve("open('FOLDER/victim.txt', 'a').write('x')"),
    "write through shared memory": _solve("open('/dev/shm/teamtr-hostile', 'w').write('x')"),
    "make a nameless file": _solve("os.write(os.memfd_create('m'), b'x' * 99)"),
    "list folders": _solve("return found([os.listdir(p) for p in ('/', '/proc', 'FOLDER')])"),
    "import from a folder": _solve(
        "import importlib.machinery",
        "sys.path.insert(0, 'FOLDER')",
        "sys.meta_path.append(importlib.machinery.PathFinder)",
        "import planted",
        "return planted.SECRET",
    ),
    "load a module from a file": _solve(
        "from importlib.machinery import SourceFileLoader",
        "return found(SourceFileLoader('planted', 'FOLDER/planted.py').get_data('FOLDER/planted.py'))",
    ),
    "map a file": _solve(
        "import mmap", "return found(mmap.mmap(os.open('FOLDER/secret.txt', 0), 0, access=mmap.ACCESS_READ)[:])"
    ),
}

PATHS = {
    "delete a file": _solve("os.unlink('FOLDER/victim.txt')"),
    "rename a file": _solve("os.rename('FOLDER/victim.txt', 'FOLDER/gone.txt')"),
    "empty a file": _solve("os.truncate('FOLDER/victim.txt', 0)"),
    "make a folder": _solve("os.mkdir('FOLDER/new')"),
    "make a symbolic link": _solve("os.symlink('/etc/passwd', 'FOLDER/link')"),
    "make a hard link": _solve("os.link('FOLDER/victim.txt', 'FOLDER/link')"),
    "make a pipe with a name": _solve("os.mkfifo('FOLDER/pipe')"),
    "make a device": _solve("os.mknod('FOLDER/device', 0o600, os.makedev(1, 1))"),
    "set times": _solve("os.utime('FOLDER/victim.txt', (1, 1))"),
    "kill everything": _solve("os.kill(-1, signal.SIGKILL)"),
}
"""What limits alone do not stop: calls that need no descriptor and no new process."""

RIGHTS = {
    "change rights": _solve("os.chmod('FOLDER/secret.txt', 0o777)"),
    "change the owner": _solve("os.chown('FOLDER/secret.txt', 0, 0)"),
    "become root": _solve("os.setuid(0)", "return found(open('FOLDER/secret.txt').read())"),
    "new namespaces": _solve("libc.unshare(0x10000000 | 0x20000)", "libc.mount(b'none', b'/', b'tmpfs', 0, None)"),
    "mount over a folder": _solve("return libc.mount(b'none', b'FOLDER', b'tmpfs', 0, None) and 'no'"),
    "leave the root": _solve("os.chroot('/')", "return found(open('/proc/PID/environ').read())"),
    "raise the limits": _solve(
        "import resource",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (99, 99))",
        "return found(open('FOLDER/secret.txt').read())",
    ),
}

NETWORK = {
    "connect": _solve("import _socket", "_socket.socket(2, 1).connect(('127.0.0.1', PORT))"),
    "send a datagram": _solve("import _socket", "_socket.socket(2, 2).sendto(b'x', ('127.0.0.1', PORT))"),
    "local socket": _solve("import _socket", "_socket.socket(1, 1).connect('FOLDER/socket')"),
    "listen": _solve("import _socket", "s = _socket.socket(2, 1)", "s.bind(('', 0))", "s.listen()", "time.sleep(9)"),
    "look up a name": _solve("import _socket", "return found(_socket.getaddrinfo('localhost', PORT))"),
    "socket through C": _solve("return found(libc.connect(libc.socket(2, 1, 0), b'x' * 16, 16))"),
}

PROCESSES = {
    "fork": _solve("return 'child' if os.fork() == 0 else os.wait()[0] and 'parent'"),
    "fork bomb": _solve("while True:", "    try:", "        os.fork()", "    except OSError:", "        pass"),
    "fork through C": _solve("while True:", "    libc.fork()"),
    "raw clone": _solve(
        "while True:", "    libc.syscall(220 if os.uname().machine == 'aarch64' else 56, 17, 0, 0, 0, 0)"
    ),
    "daemon": _solve(
        "if os.fork() == 0:", "    os.setsid()", "    if os.fork() == 0:", "        time.sleep(1000)", "    os._exit(0)"
    ),
    "spawn a shell": _solve("os.posix_spawn('/bin/sh', ['sh', '-c', 'touch FOLDER/spawned'], {})"),
    "start a program": _solve("import subprocess", "subprocess.run(['touch', 'FOLDER/ran'])"),
    "become a shell": _solve("os.execv('/bin/sh', ['sh', '-c', 'touch FOLDER/became'])"),
    "threads": _solve("import threading", "while True:", "    threading.Thread(target=time.sleep, args=(9,)).start()"),
}

SIGNALS = {
    "kill the asker": _solve("os.kill(PID, signal.SIGKILL)"),
    "kill the server": _solve("os.kill(os.getppid(), signal.SIGKILL)"),
    "interrupt the server": _solve("os.kill(os.getppid(), signal.SIGINT)"),
    "stop the server": _solve("os.kill(os.getppid(), signal.SIGSTOP)", "os.kill(1, signal.SIGSTOP)"),
    "kill the group": _solve("os.killpg(0, signal.SIGKILL)"),
    "kill itself": _solve("os.kill(os.getpid(), signal.SIGKILL)"),
    "stop itself": _solve("os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(1000)"),
    "deaf to all signals": _solve(
        "for number in range(1, 65):",
        "    try:",
        "        signal.signal(number, signal.SIG_IGN)",
        "    except (OSError, ValueError):",
        "        pass",
        "while True: pass",
    ),
    "outlive the server": _solve("libc.prctl(1, 0, 0, 0, 0)", "os.setsid()", "time.sleep(1000)"),
    "alarm that leaves": _solve(
        "signal.signal(signal.SIGALRM, lambda *_: os._exit(0))", "signal.setitimer(0, 0.01)", "while True: pass"
    ),
}

SPYING = {
    "environment": _solve("return found(dict(os.environ))"),
    "environment of the asker": _solve("return found(open('/proc/PID/environ').read())"),
    "memory of the asker": _solve(
        "with open('/proc/PID/maps') as maps, open('/proc/PID/mem', 'rb') as memory:",
        "    for line in maps:",
        "        low, high = (int(end, 16) for end in line.split()[0].split('-'))",
        "        if ' rw-p ' in line and high - low <= 64 << 20:",
        "            memory.seek(low)",
        "            if (secret := found(memory.read(high - low).decode('latin-1'))) != 'nothing':",
        "                return secret",
    ),
    "memory of the server": _solve("return found(open('/proc/%d/mem' % os.getppid(), 'rb').read(9))"),
    "trace the asker": _solve("return found(libc.ptrace(16, PID, None, None))"),
    "trace the server": _solve("return found(libc.ptrace(16, os.getppid(), None, None))"),
    "read another's memory": _solve(
        "buffer = ctypes.create_string_buffer(64)",
        "vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)",
        "libc.process_vm_readv(PID, vector, 1, vector, 1, 0)",
        "return found(buffer.raw)",
    ),
    "every object": _solve(
        "return found([str(thing) for thing in gc.get_objects() if isinstance(thing, (str, dict))])"
    ),
    "every frame": _solve(
        "frame, seen = sys._getframe(), []",
        "while frame:",
        "    seen += [dict(frame.f_locals), dict(frame.f_globals)]",
        "    frame = frame.f_back",
        "return found(seen)",
    ),
    "trace every call": """
        seen = []
        def spy(frame, event, argument):
            seen.append(str(frame.f_locals)[:9999])
            return spy
        def solve(x):
            sys.settrace(spy)
            json.dumps([1])
            return found(seen)
    """,
    "read every descriptor": _solve(
        "read = []",
        "for fd in range(64):",
        "    try:",
        "        read.append(os.read(fd, 999) if fd != 0 else b'')",
        "    except OSError:",
        "        pass",
        "return found(read)",
    ),
}

RESOURCES = {
    "8 GB": _solve("return len(bytearray(8 << 30)) and 'no'"),
    "8 GB through C": _solve(
        "libc.malloc.restype = ctypes.c_void_p",
        "pointer = libc.malloc(ctypes.c_size_t(8 << 30))",
        "ctypes.memset(pointer, 1, 8 << 30)",
    ),
    "grow for ever": _solve("grown = ['x']", "while True: grown += grown"),
    "endless output": _solve("while True: print('True' * 1000, flush=True)"),
    "endless errors": _solve("while True: os.write(2, b'True' * 1000)"),
    "endless reply": _solve(
        "while True:",
        "    for fd in range(3, 32):",
        "        try: os.write(fd, b'x' * 4096)",
        "        except OSError: pass",
    ),
    "a reply of 10 MB": _solve("return 'x' * 10_000_000"),
    "a reply that nests": _solve("nested = []", "for _ in range(900): nested = [nested]", "return nested"),
    "endless loop": _solve("while True: pass"),
    "sleep": _solve("time.sleep(1000)"),
    "power tower": _solve("return 9 ** 9 ** 9 % 10"),
    "backtracking": _solve("return re.match('(a+)+$', 'a' * 60 + 'b')"),
    "recursion": _solve("return solve(x)"),
    "recursion without a limit": _solve("sys.setrecursionlimit(1 << 30)", "return solve(x)"),
    "null pointer": _solve("return ctypes.string_at(0)"),
    "abort": _solve("os.abort()"),
    "a source that nests": "(" * 5000 + ")" * 5000,
    "endless at load": "while True: pass",
}

FORGERY = {
    "print True": _solve("print(True)", "print('True', file=sys.stderr)"),
    "leave early": _solve("os._exit(0)"),
    "leave early, loudly": _solve("print('True', flush=True)", "os._exit(0)"),
    "leave at load": "import os\nos._exit(0)",
    "exit": _solve("sys.exit(0)"),
    "interrupt": _solve("raise KeyboardInterrupt"),
    "equal to everything": """
        class Equal:
            __eq__ = lambda self, other: True
            __ne__ = lambda self, other: False
            __bool__ = lambda self: True
            __hash__ = lambda self: 0
        def solve(x):
            return Equal()
    """,
    "a text equal to everything": """
        class Equal(str):
            __eq__ = lambda self, other: True
            __hash__ = str.__hash__
        def solve(x):
            return Equal("x")
    """,
    "patched built-ins": """
        builtins.type = lambda thing: str
        builtins.isinstance = lambda *_: True
        builtins.all = builtins.any = builtins.bool = lambda *_: True
        def solve(x):
            return object()
    """,
    "patched json": """
        json.dumps = lambda *_, **__: '{"value": [true]}'
        sys.modules["json"] = None
        def solve(x):
            return True
    """,
    "patched server": """
        for module in list(sys.modules.values()):
            if "sandbox" in getattr(module, "__name__", ""):
                for name in list(vars(module)):
                    if callable(vars(module)[name]):
                        setattr(module, name, lambda *_, **__: True)
        def solve(x):
            return True
    """,
    "frames of its own": _solve(
        "head = json.dumps({'nonce': '0' * 32, 'kind': 'ok', 'message': ''}).encode()",
        'body = b\'{"value": ["secret"]}\'',
        "for fd in range(32):",
        "    try: os.write(fd, b''.join(len(part).to_bytes(8, 'big') + part for part in (head, body)))",
        "    except OSError: pass",
        "os._exit(0)",
    ),
    "a reply of its own": _solve(
        "for fd in range(3, 32):",
        "    try: os.write(fd, b'{\"value\": [true]}')",
        "    except OSError: pass",
        "os._exit(0)",
    ),
    "more replies than inputs": _solve(
        "for fd in range(3, 32):",
        "    try: os.write(fd, b'{\"value\": [1, 2, 3]}')",
        "    except OSError: pass",
        "os._exit(0)",
    ),
    "close every descriptor": _solve("os.closerange(0, 99)", "return True"),
    "not a number": _solve("return float('nan')"),
    "true": _solve("return True"),
    "nothing": _solve("return None"),
    "no such function": "solved = True",
    "not a function": "solve = 'secret'",
    "no Python": "True\n    return ]",
}

WITHIN_LIMITS = {
    **FILES,
    **RIGHTS,
    **NETWORK,
    **PROCESSES,
    **SIGNALS,
    **SPYING,
    **RESOURCES,
    **FORGERY,
}
"""What even limits alone stop, where root can become nobody."""

HOSTILE = {**WITHIN_LIMITS, **PATHS}
