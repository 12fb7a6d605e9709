"""Every kernel compiles for a card, with the arguments that it is really called with, on a machine that has none.

The interpreter, which ``test_serving.py`` uses, computes what a kernel says and knows nothing of layouts, types of a
product's factors or shared memory: what only the compiler refuses is found here.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from teamtr.engines.paged import products
from teamtr.engines.paged.buffers import MOST_ENDS
from teamtr.engines.paged.work_split import Together, most_members
from teamtr.engines.torch.head import OutputLayer
from teamtr.engines.torch.rotation import Rotation
from teamtr.engines.torch.scoring import fused_features, fused_score

pytestmark = pytest.mark.long
HALVES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)]

triton = pytest.importorskip("triton", reason="triton is not installed (Linux only)")
from teamtr.engines.torch import early_launch  # noqa: E402 (it needs triton)

CARD = ("cuda", 90, 32)
SHARED_MEMORY = 227 << 10
"""Of one program on that card."""
NAMES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip


class Compiled(list[str]):
    """The names of the kernels, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.by_number: set[str] = set()
        """Kernels that read numbers of two bytes one by one, at a fraction of the card's bandwidth."""


@pytest.fixture
def compiled(monkeypatch, tmp_path) -> Compiled:
    """Launches are compiled for the card and not run."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    done = Compiled()

    def compile_it(self, *args, grid, warmup, **options):
        named = {k: v for k, v in options.items() if k in self.arg_names}
        given = dict(zip(self.arg_names, args, strict=False)) | named
        settings = {k: v for k, v in options.items() if k not in self.arg_names}
        assert set(given) == set(self.arg_names), "every argument is given"
        constants = {k: v for k, v in given.items() if self.params[self.arg_names.index(k)].is_constexpr or _is_one(v)}
        aligned = [name for name in self.arg_names if name not in constants and _is_aligned(given[name])]
        source = ASTSource(
            self,
            {name: "constexpr" if name in constants else _type(given[name]) for name in self.arg_names},
            constexprs={(self.arg_names.index(k),): v for k, v in constants.items()},
            attrs={(self.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        )
        made = triton.compile(source, target=GPUTarget(*CARD), options=settings)
        assert made.metadata.shared <= SHARED_MEMORY
        if options.get("launch_pdl"):
            before, wait, _ = made.asm["ptx"].partition("griddepcontrol.wait")
            assert wait
            assert not re.search(r"\b(ld|st|atom|red)\.(volatile\.)?global|cp\.async|prefetch", before)
        done.append(self.__name__)
        if "ld.global.b16" in made.asm["ptx"]:
            done.by_number.add(self.__name__)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_it)
    monkeypatch.setattr(early_launch, "launches_early", lambda device: True)
    return done


def _is_one(value: object) -> bool:
    """Whether a launch makes it a constant, which has no methods of a tensor."""
    return type(value) is int and value == 1


def _is_aligned(value: object) -> bool:
    """Whether a launch tells the compiler so. Pointers are: memory of a card is."""
    return isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return NAMES[value.dtype]
    if hasattr(value, "block_shape"):
        return f"tensordesc<{NAMES[value.base.dtype][1:]}{value.block_shape}>".replace(" ", "")
    return "fp32" if isinstance(value, float) else "i32"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype"),
    [
        pytest.param(16, 8, 128, torch.bfloat16, marks=pytest.mark.slow),
        (9, 3, 64, torch.float16),
        pytest.param(8, 4, 256, torch.float16, marks=pytest.mark.slow),
        pytest.param(9, 3, 64, torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_attention(compiled, heads, kv_heads, dim, dtype):
    from teamtr.engines.paged import kernels

    rows = 512
    pool = torch.zeros(2, 3, kv_heads, kernels.PAGE, dim, dtype=dtype)
    table, length = torch.ones(rows, 2, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    parts = [torch.zeros(rows, count, dim, dtype=dtype) for count in (heads, kv_heads, kv_heads)]
    weight, angles = torch.ones(dim, dtype=dtype), torch.zeros(rows, dim, dtype=dtype)
    rotation = Rotation(angles, angles, weight, weight, 1e-6)
    together = Together.none(rows, most_members(heads // kv_heads, dtype), torch.device("cpu"))
    kernels.decode_attention(*parts, pool[0], pool[1], table, length, 1.0, rotation)
    kernels.decode_attention(*parts, pool[0], pool[1], table, length, 1.0, rotation, together)
    few = [part[:8] for part in parts]
    kernels.decode_attention(*few, pool[0], pool[1], table[:8], length[:8], 1.0)
    turned = Rotation(angles[:8], angles[:8], weight, weight, 1e-6)  # few rows that read a long prompt together
    kernels.decode_attention(*few, pool[0], pool[1], table[:8], length[:8], 1.0, turned, together.of(8))
    at = torch.zeros(rows, dtype=torch.int64)
    kernels.rotate_into_pages(*parts, rotation, pool[0], pool[1], at, at)
    kernels.prefill_attention(parts[0], pool[0], pool[1], table, torch.zeros(4, 1, dtype=torch.int32), 1.0)
    assert compiled == [
        "_decode_kernel", "_common_kernel", "_decode_kernel", "_decode_kernel", "_join_kernel",
        "_common_kernel", "_decode_kernel", "_join_kernel", "_rotate_kernel", "_prefill_kernel",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "rank", "dtype"),
    [
        (6144, 16, torch.float16),
        (576, 8, torch.bfloat16),
        pytest.param(2048, 48, torch.float16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_products_with_narrow_factors(compiled, width, rank, dtype):
    from teamtr.engines.torch import narrow_products

    wide, factor = torch.zeros(600, width, dtype=dtype), torch.zeros(rank, width, dtype=dtype)
    narrow = narrow_products.narrow(wide, factor)
    narrow_products.across(wide, narrow)
    narrow_products.across_and_along(wide, narrow, factor.T)
    joined = torch.zeros(600, 3 * rank, dtype=dtype)
    narrow_products.across_and_along(wide, joined, factor.T, 0.5, (width // 2, width // 4, width // 4))
    assert compiled == ["_narrow_kernel", *["_across_kernel", "_add_kernel"] * 3]
    assert not compiled.by_number or rank % 16


@pytest.mark.parametrize(("outputs", "columns", "rank", "adapters"), [(12288, 96, 16, 3), (576, 24, 4, 2)], ids=str)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_adapters_by_row(compiled, outputs, columns, rank, adapters, dtype):
    from teamtr.engines.paged.adapter_kernel import with_own_adapter

    product, up = torch.zeros(1, 256, outputs + columns, dtype=dtype), torch.zeros(outputs, columns, dtype=dtype)
    assert with_own_adapter(product, up, torch.zeros(256, dtype=torch.int64), rank, adapters).shape == (1, 256, outputs)
    assert compiled == ["_own_adapter_kernel"]
    assert not compiled.by_number or rank % 16


def test_drawing(compiled):
    from teamtr.engines.paged import drawing_kernels

    ids, logp = drawing_kernels.draw_token(torch.zeros(4, 151_936), torch.zeros(4, dtype=torch.float64))
    whole, half = torch.zeros(4, dtype=torch.int64), torch.zeros(4, dtype=torch.int32)
    noise, alive = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.bool)
    seats = (whole, half, noise, whole, whole, alive, whole, torch.zeros(4, MOST_ENDS).long())
    said, kept = torch.zeros(9, 16), torch.zeros(9, 16, 2048, dtype=torch.float16)
    for of_rows in (None, kept):
        drawing_kernels.record_tokens(
            ids, logp, torch.zeros(4, 2048).half(), seats, said.double(), said.long(), said, of_rows, fed=True
        )
    alone = tuple(state[:1] for state in seats)  # buffers for one row, and the spare one
    for tokens in (16, 1):
        said = torch.zeros(2, tokens)
        features = torch.zeros(1, 2048).half()
        drawing_kernels.record_tokens(
            ids[:1], logp[:1], features, alone, said.double(), said.long(), said, None, fed=True
        )
    drawing_kernels.draw_token(torch.zeros(1, 151_936), torch.zeros(1, dtype=torch.float64))
    assert compiled == ["_mass_kernel", "_pick_kernel", *["_record_kernel"] * 4, "_mass_kernel", "_pick_kernel"]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_products_of_few_rows(compiled, dtype):
    """All ways to cut them, with and without a bias; the shapes of Qwen3-1.7B, which has none, and of Qwen2.5-1.5B."""
    from teamtr.engines.paged import product_kernel

    cut, bias = set(), torch.zeros(4096, dtype=dtype)
    for rows in (64, 128, 256):
        x, weight = torch.zeros(rows, 2048, dtype=dtype), torch.zeros(4096, 2048, dtype=dtype)
        assert product_kernel.has_room(x)
        for outputs in (2048, 4096):
            tiles = product_kernel.plain_tiles(rows, outputs, 2048, 132)
            if tiles is not None and tiles not in cut:
                product_kernel.product(x, weight[:outputs], bias[:outputs] if rows == 128 else None, tiles)
                cut.add(tiles)
        product_kernel.gated_product(x, weight, bias, product_kernel.gated_tiles(rows, 4096, 2048, 132))
    assert cut == set(product_kernel.WIDTHS)
    assert compiled == ["_product_kernel"] * 7


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "found"),
    [
        (8, 4096, 2048, 32), (64, 4096, 2048, 32), (96, 4096, 2048, 64), (128, 4096, 2048, 64),
        (192, 4096, 2048, None), (256, 4096, 2048, 128), (384, 4096, 2048, None),  # of many rows, those that fill tiles
        (128, 2048, 6144, 32), (256, 2048, 6144, None),  # torch is faster where much is to be computed
        (64, 6144, 4096, None), (128, 10240, 4096, None),  # too few programs, or too many at once
        (64, 2048, 2000, None),  # not whole tiles
    ],
)  # fmt: skip
def test_a_product_is_cut_into_a_program_for_most_cores_or_left_to_torch(rows, outputs, inputs, found):
    from teamtr.engines.paged.product_kernel import plain_tiles

    tiles = plain_tiles(rows, outputs, inputs, 132)
    assert (tiles and tiles.outputs) == found


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "found"),
    [
        (64, 24576, 4096, 64), (128, 12288, 2048, 64), (256, 12288, 2048, 128), (8, 12288, 2048, 64),
        (192, 12288, 2048, None),
        (128, 24576, 4096, None), (256, 24576, 4096, None),  # more programs than run at once
        (64, 100, 2048, None), (64, 12288, 100, None),
    ],
)  # fmt: skip
def test_gate_and_up_are_one_product_where_all_programs_run_at_once(rows, outputs, inputs, found):
    from teamtr.engines.paged.product_kernel import gated_tiles

    tiles = gated_tiles(rows, outputs, inputs, 132)
    assert (tiles and tiles.outputs) == found


def test_early_launches_need_a_card_that_knows_them(monkeypatch):
    device = torch.device("cuda", 0)
    for capability, hip, found in (
        ((9, 0), None, True),
        ((12, 0), None, False),
        ((8, 9), None, False),
        ((9, 4), "7", False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert early_launch.launches_early.__wrapped__(device) is found
    assert early_launch.early(torch.zeros(1)) == {"EARLY": False}


@pytest.mark.parametrize(("launches", "cores", "found"), [(True, 132, 132), (True, 78, None), (False, 188, None)])
def test_products_are_ours_on_cards_that_they_were_cut_for(launches, cores, found, monkeypatch):
    """An H200, an H20, and a card that launches nothing early, whose shared memory may be less."""
    monkeypatch.setattr(early_launch, "launches_early", lambda device: launches)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=cores)
    )
    assert products.cores_of.__wrapped__(torch.device("cuda", 0)) == found


def test_a_product_that_tiles_cannot_be_read_for_is_left_to_torch(monkeypatch):
    """Without room behind its last row, in another dtype, at an odd address, or in columns of a wider tensor."""
    monkeypatch.setattr(products, "computed_by_kernels", lambda x: True)
    monkeypatch.setattr(products, "cores_of", lambda device: 132)
    memory = torch.zeros(64 * 2048 + 1, dtype=torch.float16)
    x, weight = memory[:-1].view(64, 2048), torch.zeros(4096, 2048, dtype=torch.float16)
    assert products.tiles_of(x[:40], weight) is not None
    assert products.tiles_of(x[:40], weight, gated=True) is not None
    assert products.tiles_of(x[:40].clone(), weight) is None
    assert products.tiles_of(x[30:], weight) is None
    assert products.tiles_of(memory[1:].view(64, 2048), weight) is None
    assert products.tiles_of(x, weight.float()) is None
    assert products.tiles_of(x, torch.zeros(4096, 4096, dtype=torch.float16)[:, :2048]) is None
    assert products.tiles_of(x[:0], weight) is products.tiles_of(x[:0], weight, gated=True) is None


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("width", "inner", "heads", "kv_heads", "dim"),
    [(2048, 6144, 16, 8, 128), pytest.param(576, 1536, 9, 3, 64, marks=pytest.mark.slow)],
    ids=str,
)
def test_what_lies_between_the_learners_products(compiled, width, inner, heads, kv_heads, dim, dtype):
    from teamtr.engines.torch.fused_layers import add_norm, added, branch, gated, gated_rows, norm, summed
    from teamtr.engines.torch.fused_rotation import angles, turned, turned_rows

    residual, delta = torch.zeros(8, width, requires_grad=True), torch.zeros(8, width, dtype=dtype, requires_grad=True)
    norm(residual, torch.ones(width), 1e-6, dtype).sum().backward()
    branch(residual, torch.ones(width), 1e-6, dtype)[1].sum().backward()
    add_norm(residual, delta, torch.ones(width), 1e-6, dtype)[1].sum().backward()
    assert compiled == ["_norm_kernel", "_norm_gradient_kernel"] * 3
    added(residual, delta).sum().backward()
    gate, up = (torch.zeros(8, inner, dtype=dtype, requires_grad=True) for _ in range(2))
    gated(gate, up).sum().backward()
    gated_rows(torch.zeros(8, 2 * inner, dtype=dtype, requires_grad=True)).sum().backward()
    query = torch.zeros(8, heads, dim, dtype=dtype, requires_grad=True)
    cos, sin = angles(torch.zeros(8, dtype=torch.int64), torch.ones(dim // 2), 1.0, dtype)
    for weight in (torch.ones(dim), None):
        turned(query, cos, sin, weight, 1e-6).sum().backward()
        rows = torch.zeros(8, (heads + 2 * kv_heads) * dim, dtype=dtype, requires_grad=True)
        parts = turned_rows(rows, cos, sin, weight, weight, 1e-6, heads, kv_heads)
        torch.cat(parts, 1).sum().backward()
    gates, turns = ["_gate_kernel", "_gate_gradient_kernel"], ["_turn_kernel"] * 2 + ["_turn_rows_kernel"] * 2
    summed(torch.zeros(9, kv_heads, dim, dtype=dtype), torch.arange(9), torch.arange(5))
    assert compiled[6:] == ["_sum_kernel", *gates * 2, "_angles_kernel", *turns * 2, "_sum_rows_kernel"]
    assert not compiled.by_number or width % 1024


def test_scoring_and_its_gradient(compiled):
    new, cur = torch.zeros(4, 151_936, requires_grad=True), torch.zeros(4, 151_936)
    logp, kl = fused_score(new, cur, torch.zeros(4, dtype=torch.int64))
    (logp.sum() + kl.sum()).backward()
    half = OutputLayer(torch.zeros(1), None, 1.0, torch.zeros(151_936, 8).half())
    features, ids = torch.zeros(4, 8, requires_grad=True), torch.zeros(4, dtype=torch.int64)
    fused_features(half, half, features, torch.zeros(4, 8), ids, keep=True)[0].sum().backward()
    assert compiled == ["_score_kernel", "_gradient_kernel"] * 2


def test_a_program_has_as_few_warps_as_hold_its_sums():
    """16 queries at least, of heads of 64 to 256 numbers; 2,048 sums for each warp."""
    from teamtr.engines.paged.kernels import _warps

    assert [_warps(16 * dim, torch.float16) for dim in (64, 128, 256, 512)] == [1, 1, 2, 4]
    assert [_warps(64 * 128, torch.bfloat16), _warps(64 * 256, torch.bfloat16)] == [4, 4]
    assert _warps(16 * 64, torch.float32) == 4
