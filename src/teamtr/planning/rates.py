"""Rates that are reached in practice, as shares of data-sheet rates, and overheads, each with its source.

"H200" figures are in docs/performance.md, for the shape of Qwen3-1.7B; shares are of the data sheet's rates (989
TFLOP/s in half precision, 4.8 TB/s). Constants that are assumed and were never measured say so. ``bench/throughput.py``
prints the predictions made from them next to every measured figure.
"""

from __future__ import annotations

# -- sampling on a card ---------------------------------------------------------------------------------------

DECODE_PRODUCTS = 0.52
"""Share of the matrix rate when many rows decode a token each: 2 x 1.41e9 weights x 256 rows in 1.40 ms."""
DECODE_HEAD = 0.70
"""The same for the output layer: 2 x 0.31e9 x 256 in 0.23 ms."""
READ = 0.82
"""Share of the bandwidth when keys and values are read: 9.4 GB in 2.4 ms, which is what a step of 4.59 ms leaves beside
products, blocks and drawing. Rows behind 8,192 tokens reach 0.89. Assumed for weights too, when there are few rows."""
PREFILL = 0.47
"""Share of the matrix rate: 65,536 prompt tokens in 0.40 s (a whole call takes 1.005 s, of which decoding takes
0.607)."""
BLOCK_S = 19e-6
"""Seconds per step of a block's norms, its gate and the gaps between its kernels: 0.54 ms for 28 blocks, with our
kernels as with torch's compiler. A model that neither can fuse takes 68e-6 (41,800 tokens/s instead of 54,000); this
cannot be seen in a config."""
DRAW_S = 50e-6
"""Seconds per step of drawing a token."""
FILL_BYTES = 14
"""Bytes read and written per weight when an adapter is merged into the sampling copy: by count, not measured."""

# -- scoring and training on a card ---------------------------------------------------------------------------

SCORE = {"fp16": 0.44, "bf16": 0.44, "tf32": 0.33, "fp32": 0.55}
"""Share of the matrix rate in passes without gradients. Half precision: 512 messages of 256 tokens, 32 per pass, in
1.18 s after contexts of 256 tokens (0.44) and in 2.80 s after 768 (0.47). Float32: an update of 8 messages of 1,024
tokens in 3.78 s. TF32: the share that half precision had with an older learner, assumed."""
TRAIN = {"fp16": 0.41, "bf16": 0.41, "tf32": 0.31, "fp32": 0.55}
"""The same for forward and backward passes. Half precision: a step on 128 of these messages in 0.873 s (0.40) and 1.775
s (0.44)."""
ATTENTION = {"fp16": 0.6, "bf16": 0.6}
"""The same for attention, forward and backward, where it differs from that of the other products. Rows of 65,792
tokens: 0.63 forward (0.60 with 33,024), 0.58 in a step with recomputation (bench/long.py). Other precisions were not
measured."""
HOST_BLOCK_S = 2.1e-3
"""Seconds of Python and kernel launches for one block in one pass of the learner (a backward pass counts twice). The
same messages after contexts of 256 tokens, 16 per pass, where the card waits for launches: 2.3 ms in a step (1.563 s, 8
passes through 28 blocks), 1.9 ms in scoring (1.68 s, 32 passes)."""

# -- a CPU ----------------------------------------------------------------------------------------------------

CPU_SHARE = 0.61
"""Share of a core's matrix rate. This and the seconds below are from one process that samples with the built-in model
of four blocks of width 256: 16 problems in four shards (15.3 s) and in one (10.4 s), 32 in four (23.5 s)."""
CPU_BLOCK_S = 6e-3
"""Seconds of a block in one pass, whatever the number of rows."""

# -- between processes ----------------------------------------------------------------------------------------

CALL_S = 2.3e-3
"""Seconds of a call to a worker through Ray (about 200 calls in a small run, two CPU cores)."""
CALLS_OF_UPDATE = 25
CALLS_OF_TURN = 3
GLOO = 2.8e9
"""Bytes per second that gloo sends from one process to another: a broadcast of 64 MB between two processes of one
machine. Among four processes on two cores it was 1.06e9, with two hops."""
HOST_ADD = 0.75e9
"""Bytes per second of adding a gradient to a running sum, into new memory, in one thread: 64 MB in 88 ms."""
GATHER = 0.7
"""Share of the link's rate when the parts of a layer are gathered: assumed."""
DISK = 1.0e9
"""Bytes per second of writing a checkpoint: assumed."""
