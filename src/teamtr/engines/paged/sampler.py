"""The sampler of a GPU: prefill what is not yet in pages, then decode with one captured graph per batch size.

How a call goes, numbered as in the code:

1. rows are admitted as far as pages reach; prefixes that some page already holds are not computed again, and the
   episodes of a group share their prompt's pages;
2. all admitted rows take their first token from the prefill;
3. the graph of the smallest captured size that holds them is replayed, a few tokens at a time; rows that begin with
   the same pages read them together;
4. rows that ended leave, their pages can be found by later calls, and the others close ranks.

Every token is drawn with the number that the caller's noise table holds for its row and place: company, order and
batch sizes change nothing but rounding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teamtr.engines.paged.layout import Decoding, Prefilling
from teamtr.engines.paged.pages import SCRATCH, Pool
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.paged.work_split import Cluster, Together, clusters, most_members, remaining, splits, worth_it
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch.attention import AttentionShape, Layout, attending, text_config
from teamtr.errors import UserError
from teamtr.ports import Follow, Heard, unfollowed, unheard
from teamtr.progress import Work, working
from teamtr.types import Finish, Ids, Sample

PAGE = 64
SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PREFILL_TOKENS = 16_384
"""Tokens of one prefill pass."""
LOOK_EVERY = 16
"""Tokens between two looks at who has ended."""


@dataclass
class _Sequence:
    """One row being written: its place in the call, its prompt and its pages."""

    row: int
    prompt: Ids
    pages: list[int]


@dataclass
class DecodeBuffers:
    """The tensors that captured graphs read and write; their addresses stay while the buffers stand."""

    rows: int
    tokens: int
    width: int
    members: int
    device: torch.device
    token: Tensor = field(init=False)
    position: Tensor = field(init=False)
    step: Tensor = field(init=False)
    row: Tensor = field(init=False)
    alive: Tensor = field(init=False)
    table: Tensor = field(init=False)
    uniform: Tensor = field(init=False)
    ids: Tensor = field(init=False)
    logp: Tensor = field(init=False)
    limit: Tensor = field(init=False)
    ends: Tensor = field(init=False)
    together: Together = field(init=False)
    clusters: list[Cluster] = field(default_factory=list)
    graphs: dict[tuple[int, TokenSampler, bool], Any] = field(default_factory=dict)
    memory: Any = None  # of the graphs, which share it; it goes with the last of them

    def __post_init__(self) -> None:
        sequences = SIZES[-1]

        def make(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=self.device)

        self.token, self.step, self.row = make(sequences), make(sequences), make(sequences)
        self.position = make(sequences, dtype=torch.int32)
        self.alive = make(sequences, dtype=torch.bool)
        self.table = make(sequences, self.width, dtype=torch.int32)
        # One row more than asked for: rows without work write there.
        self.uniform = make(self.rows + 1, self.tokens, dtype=torch.float64)
        self.ids = make(self.rows + 1, self.tokens)
        self.logp = make(self.rows + 1, self.tokens, dtype=torch.float32)
        self.limit = make(1)
        self.ends = torch.full((64,), -1, device=self.device)
        self.together = Together.none(sequences, self.members, self.device)

    def fits(self, rows: int, tokens: int, width: int) -> bool:
        return rows <= self.rows and tokens <= self.tokens and width <= self.width

    def start(self, uniform_BT: NDArray[np.float64], end_ids: frozenset[int]) -> None:
        rows, tokens = uniform_BT.shape
        self.uniform[:rows, :tokens] = torch.as_tensor(uniform_BT, device=self.device)
        self.ends.fill_(-1)
        self.ends[: len(end_ids)] = torch.tensor(sorted(end_ids), device=self.device)
        self.limit.fill_(tokens)
        self.clusters = []
        self.clear(0)

    def clear(self, first: int) -> None:
        """Seats from here on have no work."""
        self.alive[first:] = False
        self.table[first:] = SCRATCH
        self.position[first:] = 0
        self.step[first:] = 0
        self.row[first:] = self.rows

    def keep(self, sequences: Sequence[int]) -> None:
        """Only these sequences stay, in this order."""
        index = torch.tensor(sequences, dtype=torch.int64, device=self.device)
        for state in (self.token, self.position, self.step, self.row, self.alive, self.table):
            state[: len(sequences)] = state[index]
        self.clear(len(sequences))

    def record(self, here: slice, ids_N: Tensor, logp_N: Tensor) -> None:
        """Write down these sequences' tokens and move on. Seats without work write to the spare row."""
        alive_N, step_N = self.alive[here], self.step[here]
        target_N = torch.where(alive_N, self.row[here], self.rows)
        self.ids.index_put_((target_N, step_N), ids_N)
        self.logp.index_put_((target_N, step_N), logp_N)
        ended_N = (ids_N[:, None] == self.ends).any(1)
        goes_on_N = alive_N & ~ended_N & (step_N + 1 < self.limit)
        self.token[here] = torch.where(alive_N, ids_N, self.token[here])
        self.step[here] = step_N + goes_on_N
        self.alive[here] = goes_on_N


class Server:
    """Samples for every agent of one architecture.

    Args:
        copy: the model that computes.
        pool_bytes: most memory for pages.
        graphs: capture the decode step (CUDA only).
        compiled: compile the decoder before it is captured: a minute at first use, a half faster after.
    """

    def __init__(self, copy: SamplingCopy, *, pool_bytes: int, graphs: bool, compiled: bool = False) -> None:
        self.copy = copy
        self._shape = AttentionShape.of(text_config(copy.model))
        self.pool_bytes = pool_bytes
        self._graphs = graphs
        self._pool: Pool | None = None
        self._buffers: DecodeBuffers | None = None
        decoder = copy.model.get_decoder()
        self._decoder: Callable[..., Any] = torch.compile(decoder, dynamic=None) if compiled else decoder
        self._compiled = compiled
        self._calls = 0

    @property
    def books(self) -> Any:
        """Who holds which page; None before the first call."""
        return None if self._pool is None else self._pool.books

    @torch.no_grad()
    def sample(
        self,
        version: str,
        prompts: Sequence[Ids],
        uniform_BT: NDArray[np.float64],
        *,
        drawing: TokenSampler,
        end_ids: frozenset[int],
        heard: Heard = unheard,
        follow: Follow = unfollowed,
    ) -> list[Sample]:
        """One message per prompt under the weights that the copy holds; ``version`` names them, and without a name
        nothing computed here is found again. ``heard`` and ``follow`` as in ``ports.Sampler``."""
        with working("tokens", uniform_BT.size, "tokens") as work:
            return self._decode(version, prompts, uniform_BT, drawing, end_ids, heard, follow, work)

    def _decode(
        self,
        version: str,
        prompts: Sequence[Ids],
        uniform_BT: NDArray[np.float64],
        drawing: TokenSampler,
        end_ids: frozenset[int],
        heard: Heard,
        follow: Follow,
        work: Work,
    ) -> list[Sample]:
        self._calls += 1
        version = version or f"call {self._calls}"
        rows, tokens = uniform_BT.shape
        self.reserve([len(prompt) for prompt in prompts], tokens)
        buffers = self._require_buffers()
        buffers.start(uniform_BT, end_ids)
        samples: dict[int, Sample] = {}
        told = dict.fromkeys(range(rows), 0)
        waiting = deque(sorted(range(rows), key=lambda b: (len(prompts[b]), prompts[b].tobytes(), b)))
        sequences: list[_Sequence] = []
        while waiting or sequences:
            # 1. and 2.: admit, and take the first token from the prefill
            fresh = self._admit(version, prompts, tokens, waiting, len(sequences), drawing)
            sequences += fresh
            # 3. decode
            if fresh and tokens > 1:
                self._share(sequences)
            steps = tokens - 1 if fresh else self._longest_wait(sequences, tokens)
            for _ in range(min(LOOK_EVERY, steps)):
                self._replay(len(sequences), drawing)
            # 4. close ranks
            alive = buffers.alive[: len(sequences)].tolist()
            work.advance(len(fresh) + len(sequences) * min(LOOK_EVERY, steps))  # some have ended on the way
            if follow is not unfollowed:
                alive = self._tell(sequences, alive, told, follow)
            if not all(alive):
                for row, sample in self._leave(version, sequences, alive, end_ids):
                    samples[row] = sample
                    heard(row, sample)
                self._put_clusters(remaining(buffers.clusters, alive))
                sequences = [sequence for sequence, stays in zip(sequences, alive, strict=True) if stays]
        return [samples[row] for row in range(rows)]

    # -- 1. and 2. --------------------------------------------------------------------------------------------

    def _admit(
        self, version: str, prompts: Sequence[Ids], tokens: int, waiting: deque[int], taken: int, drawing: TokenSampler
    ) -> list[_Sequence]:
        """Seat as many waiting rows as pages and sizes allow, prefilled and with their first token drawn."""
        pool, books = self._require_pool(), self._require_pool().books
        sequences: list[_Sequence] = []
        leader: dict[bytes, int] = {}  # prompt -> its first sequence here
        leads: list[int] = []  # for each sequence, the sequence whose hidden state it uses
        known: list[int] = []  # tokens of each leader's prompt that pages already held
        copies: list[tuple[int, int]] = []
        while waiting and taken + len(sequences) < SIZES[-1]:
            row = waiting[0]
            prompt = prompts[row]
            pages_in_all = books.needed(len(prompt) + max(tokens - 1, 1))
            full, key = len(prompt) // PAGE, prompt.tobytes()
            if key in leader:
                held = books.share(sequences[leader[key]].pages[:full])
            else:
                # At least the last token is computed: its hidden state is what the first token is drawn from.
                held = books.find(version, prompt[: (len(prompt) - 1) // PAGE * PAGE])
            if pages_in_all - len(held) > books.available and (taken or sequences):
                books.give_back(held)
                break  # it will find room once others have left
            own = held + books.take(pages_in_all - len(held))
            if key not in leader:
                leader[key] = len(sequences)
                known.append(len(held) * PAGE)
                # Named before they are computed: prompts that only begin alike share them in this very call. Whoever
                # comes later is prefilled later, or in the same pass, where a layer writes all its keys first.
                books.name(version, prompt[: full * PAGE], own)
            elif len(prompt) % PAGE:
                copies.append((sequences[leader[key]].pages[full], own[full]))
            leads.append(leader[key])
            sequences.append(_Sequence(row, prompt, own))
            waiting.popleft()
        if not sequences:
            return []
        try:
            hidden = self._prefill(sequences, list(leader.values()), known)
        except BaseException:
            self._pool = self._buffers = None  # names of pages that were never written must not be found
            raise
        pool.copy([s for s, _ in copies], [t for _, t in copies])
        self._seat(sequences, taken, hidden, leads, list(leader.values()), drawing)
        return sequences

    def _prefill(self, sequences: Sequence[_Sequence], leaders: Sequence[int], known: Sequence[int]) -> Tensor:
        """Compute what no page holds; returns the last hidden state of each leader's prompt."""
        last: list[Tensor] = []
        for part in _portions([len(sequences[s].prompt) - k for s, k in zip(leaders, known, strict=True)]):
            work = [(sequences[leaders[i]], known[i]) for i in part]
            layout = Prefilling.of(
                self._require_pool(),
                [(sequence.pages, k, len(sequence.prompt)) for sequence, k in work],
                self.copy.device,
            )
            ids = torch.as_tensor(np.concatenate([sequence.prompt[k:] for sequence, k in work]), dtype=torch.int64)
            last.append(self._hidden(layout, ids.to(self.copy.device), layout.position_N)[layout.last_R])
        return torch.cat(last)

    def _hidden(self, layout: Layout, ids_N: Tensor, position_N: Tensor) -> Tensor:
        """The last hidden states of packed tokens, [N, H]."""
        ids, position = ids_N[None], position_N[None]
        if self._compiled:
            torch._dynamo.mark_dynamic(ids, 1)
            torch._dynamo.mark_dynamic(position, 1)
        with attending(self.copy.model, layout):
            hidden: Tensor = self._decoder(input_ids=ids, position_ids=position, use_cache=False).last_hidden_state
        return hidden[0]

    def _seat(
        self,
        sequences: Sequence[_Sequence],
        taken: int,
        hidden: Tensor,
        leads: Sequence[int],
        leaders: Sequence[int],
        drawing: TokenSampler,
    ) -> None:
        buffers = self._require_buffers()
        here = slice(taken, taken + len(sequences))
        place = {leader: i for i, leader in enumerate(leaders)}
        at = torch.tensor([place[lead] for lead in leads], device=buffers.device)
        table = np.full((len(sequences), buffers.width), SCRATCH, dtype=np.int32)
        for i, sequence in enumerate(sequences):
            table[i, : len(sequence.pages)] = sequence.pages
        buffers.table[here] = torch.as_tensor(table, device=buffers.device)
        buffers.row[here] = torch.tensor([sequence.row for sequence in sequences], device=buffers.device)
        buffers.position[here] = torch.tensor(
            [len(s.prompt) for s in sequences], dtype=torch.int32, device=buffers.device
        )
        buffers.step[here] = 0
        buffers.alive[here] = True
        logits = self.copy.logits(hidden)[at]
        ids, logp = drawing(logits, buffers.uniform[buffers.row[here], 0])
        buffers.record(here, ids, logp)

    # -- 3. ---------------------------------------------------------------------------------------------------

    def _longest_wait(self, sequences: Sequence[_Sequence], tokens: int) -> int:
        return tokens - int(self._require_buffers().step[: len(sequences)].min())

    def _replay(self, sequences: int, drawing: TokenSampler) -> None:
        size = _size(sequences)
        if not self._graphs:
            self._step(size, drawing)
            return
        graphs = self._require_buffers().graphs
        key = (size, drawing, self._reads_together(size))
        if key not in graphs:
            graphs[key] = self._capture(size, drawing)
        graphs[key].replay()

    def _share(self, sequences: Sequence[_Sequence]) -> None:
        """Look for rows that begin with the same pages: whenever rows have come. When some leave, the rest go on."""
        many = splits(_size(len(sequences)), self._shape.kv_heads) == 1
        self._put_clusters(
            clusters([sequence.pages for sequence in sequences], self._require_buffers().members) if many else []
        )

    def _put_clusters(self, found: list[Cluster]) -> None:
        buffers = self._require_buffers()
        in_a_layer = Pool.bytes_per_page(self._shape, PAGE, self.copy.dtype) // self._shape.layers
        found = found if worth_it(found, in_a_layer) else []
        if found or buffers.clusters:
            buffers.together.put(found)
        buffers.clusters = found

    def _reads_together(self, size: int) -> bool:
        """Not where a row has several programs: each would add what is common once more."""
        return bool(self._require_buffers().clusters) and splits(size, self._shape.kv_heads) == 1

    def _step(self, size: int, drawing: TokenSampler) -> None:
        """One token for the first ``size`` sequences."""
        buffers = self._require_buffers()
        together = buffers.together.of(size) if self._reads_together(size) else None
        layout = Decoding(self._require_pool(), buffers.table[:size], buffers.position[:size], together)
        hidden = self._hidden(layout, buffers.token[:size], buffers.position[:size].long())
        uniform = buffers.uniform[buffers.row[:size], buffers.step[:size]]
        ids, logp = drawing(self.copy.logits(hidden), uniform)
        buffers.position[:size] += buffers.alive[:size]
        buffers.record(slice(0, size), ids, logp)

    def _capture(self, size: int, drawing: TokenSampler) -> Any:
        """Capture a step. The warm-up runs with every sequence asleep: it writes to pages what the real step will write
        there again, and moves nothing."""
        with working("capturing the decode step"):
            return self._captured(size, drawing)

    def _captured(self, size: int, drawing: TokenSampler) -> Any:
        buffers = self._require_buffers()
        awake = buffers.alive.clone()
        buffers.alive.fill_(False)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step(size, drawing)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if buffers.memory is None:
            buffers.memory = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=buffers.memory):
            self._step(size, drawing)
        buffers.alive.copy_(awake)
        return graph

    # -- 4. ---------------------------------------------------------------------------------------------------

    def _tell(
        self, sequences: Sequence[_Sequence], alive: Sequence[bool], told: dict[int, int], follow: Follow
    ) -> list[bool]:
        """Tell of the tokens since the last look; who goes on: a row that nobody wants leaves as if it had ended."""
        buffers = self._require_buffers()
        rows = torch.tensor([sequence.row for sequence in sequences], device=buffers.device)
        ids = buffers.ids[rows].cpu().numpy().astype(np.int32)
        written = buffers.position[: len(sequences)].tolist()
        goes_on = []
        for sequence, stays, position, said in zip(sequences, alive, written, ids, strict=True):
            before, upto = told[sequence.row], int(position) - len(sequence.prompt) + 1
            told[sequence.row] = upto
            wanted = upto == before or follow(sequence.row, before, said[before:upto].copy())
            goes_on.append(stays and wanted)
        return goes_on

    def _leave(
        self, version: str, sequences: Sequence[_Sequence], alive: Sequence[bool], end_ids: frozenset[int]
    ) -> list[tuple[int, Sample]]:
        """Those that ended give their pages back; what each row has said."""
        buffers, books = self._require_buffers(), self._require_pool().books
        gone = [i for i, stays in enumerate(alive) if not stays]
        written = buffers.position[: len(sequences)].tolist()
        rows = torch.tensor([sequences[i].row for i in gone], device=buffers.device)
        ids, logp = buffers.ids[rows].cpu().numpy().astype(np.int32), buffers.logp[rows].cpu().numpy()
        samples: list[tuple[int, Sample]] = []
        for i, said, logprobs in zip(gone, ids, logp, strict=True):
            sequence = sequences[i]
            # The last token drawn was never fed, so it has no key and value.
            fed = int(written[i]) - len(sequence.prompt)
            books.name(version, np.concatenate([sequence.prompt, said[:fed]]), sequence.pages)
            books.give_back(sequence.pages)
            finish: Finish = "stop" if int(said[fed]) in end_ids else "length"
            samples.append((sequence.row, Sample(said[: fed + 1].copy(), logprobs[: fed + 1].copy(), finish)))
        buffers.keep([i for i, stays in enumerate(alive) if stays])
        return samples

    # -- room -------------------------------------------------------------------------------------------------

    def reserve(self, prompts: Sequence[int], tokens: int) -> None:
        """Pages and tensors for a call with prompts of these lengths; new ones when it needs more than there are, and
        never more than the budget."""
        pages = [-(-(length + max(tokens - 1, 1)) // PAGE) for length in prompts]
        per_page = Pool.bytes_per_page(self._shape, PAGE, self.copy.dtype)
        affordable = self.pool_bytes // per_page
        if max(pages) + 1 > affordable:
            raise UserError(
                f"one message with its context needs {max(pages) + 1} pages of {per_page / 2**20:.1f} MB, more than "
                f"the {self.pool_bytes / 2**30:.2g} GB set aside; raise sampling.memory_gb or shorten the messages"
            )
        wanted = min(affordable, sum(sorted(pages)[-SIZES[-1] :]) + 1)
        if self._pool is None or self._pool.books.count < wanted:
            self._pool = self._buffers = None  # free the old ones first
            # Room for what may be found again: by the group's next turn, and by the next batch.
            count = min(affordable, 4 * wanted)
            try:
                self._pool = Pool(self._shape, count, PAGE, self.copy.dtype, self.copy.device)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"{count * per_page / 2**30:.2g} GB of keys and values do not fit into the memory that is free on "
                    f"{self.copy.device}; lower sampling.memory_gb or the number of episodes"
                ) from error
        # One column more than pages: a row that has said all it may stays for a while, and writes behind its last page.
        width = max(pages) + 1
        if self._buffers is None or not self._buffers.fits(len(prompts), tokens, width):
            old, self._buffers = self._buffers, None
            self._buffers = DecodeBuffers(
                rows=_roomy(len(prompts), old.rows if old else 0),
                tokens=_roomy(tokens, old.tokens if old else 0),
                width=_roomy(width, old.width if old else 0),
                members=most_members(self._shape.heads // self._shape.kv_heads, self.copy.dtype),
                device=self.copy.device,
            )

    def _require_pool(self) -> Pool:
        assert self._pool is not None
        return self._pool

    def _require_buffers(self) -> DecodeBuffers:
        assert self._buffers is not None
        return self._buffers


def _size(rows: int) -> int:
    """The smallest captured size that holds so many rows."""
    return next(size for size in SIZES if size >= rows)


def _roomy(needed: int, had: int) -> int:
    """A power of two that holds both: so that growing, which loses the captured graphs, happens seldom."""
    return 1 << (max(needed, had, 1) - 1).bit_length()


def _portions(tokens: Sequence[int]) -> Iterator[list[int]]:
    """Consecutive items of at most PREFILL_TOKENS in all, one item at least."""
    part: list[int] = []
    total = 0
    for i, count in enumerate(tokens):
        if part and total + count > PREFILL_TOKENS:
            yield part
            part, total = [], 0
        part.append(i)
        total += count
    if part:
        yield part
