"""How much of what data sheets say is reached, and what is lost beside it: every constant with where it comes from.

"H200" figures are in docs/performance.md, for the shape of Qwen3-1.7B; shares are of the data sheet's rates (989
TFLOP/s in half precision, 4.8 TB/s). What was assumed and never measured says so. ``bench/throughput.py`` prints
what comes of them beside every figure that was measured.
"""

from __future__ import annotations

# -- sampling on a card ---------------------------------------------------------------------------------------

DECODE_PRODUCTS = 0.52
"""Of the matrix rate, when many rows take a token each: 2 x 1.41e9 weights x 256 rows in 1.40 ms."""
DECODE_HEAD = 0.70
"""The same of the output layer: 2 x 0.31e9 x 256 in 0.23 ms."""
READ = 0.735
"""Of the bandwidth, where keys and values are read: 9.4 GB in 2.66 ms. Assumed for weights too, when rows are few."""
PREFILL = 0.47
"""Of the matrix rate: 65,536 prompt tokens in 0.40 s (a whole call takes 1.005 s, its decoding 0.607)."""
BLOCK_S = 19e-6
"""A block's norms, its gate and the gaps between its kernels, each step: 0.54 ms for 28 blocks, by our kernels as by
torch's compiler. A model that neither joins takes 68e-6 (41,800 tokens/s instead of 54,000); which one is, no config
tells."""
DRAW_S = 50e-6
"""Drawing a token, each step."""
FILL_BYTES = 14
"""Read and written for each weight, when an adapter is merged into the sampling copy: by count, not measured."""

# -- scoring and training on a card ---------------------------------------------------------------------------

SCORE = {"fp16": 0.44, "bf16": 0.44, "tf32": 0.33, "fp32": 0.55}
"""Of the matrix rate, in passes without a gradient. Half precision: 512 messages of 256 tokens, 32 a pass, in 1.18 s
behind contexts of 256 (0.44) and in 2.80 behind 768 (0.47). Float32: an update of 8 messages of 1,024 tokens in 3.78 s.
TF32: what half precision had with an older learner, assumed."""
TRAIN = {"fp16": 0.41, "bf16": 0.41, "tf32": 0.31, "fp32": 0.55}
"""The same forward and backward. Half precision: a step on 128 of these messages in 0.873 s (0.40) and 1.775 (0.44)."""
HOST_BLOCK_S = 2.1e-3
"""Python and launches of one block in one pass of the learner (a backward pass counts twice). The same messages behind
contexts of 256, 16 a pass, where the card waits for launches: 2.3 ms in a step (1.563 s, 8 passes through 28 blocks),
1.9 in scoring (1.68 s, 32 passes)."""

# -- a CPU ----------------------------------------------------------------------------------------------------

CPU_SHARE = 0.61
"""Of a core's matrix rate, and the seconds below: one process that samples with the built-in model of four blocks of
width 256, 16 problems in four shards (15.3 s) and in one (10.4 s), 32 in four (23.5 s)."""
CPU_BLOCK_S = 6e-3
"""A block in one pass, whatever its rows."""

# -- between processes ----------------------------------------------------------------------------------------

CALL_S = 2.3e-3
"""A call to a worker by Ray (about 200 in a small run, two CPU cores)."""
CALLS_OF_UPDATE = 25
CALLS_OF_TURN = 3
GLOO = 2.8e9
"""Bytes per second that gloo carries from one process to another: a broadcast of 64 MB between two processes of one
machine. Among four on two cores it had 1.06e9, with two hops."""
HOST_ADD = 0.75e9
"""Bytes per second of a gradient that is added to the sum so far, into new memory, by one thread: 64 MB in 88 ms."""
GATHER = 0.7
"""Of the link's rate, when parts of a layer are gathered: assumed."""
DISK = 1.0e9
"""Bytes per second that a checkpoint is written with: assumed."""
