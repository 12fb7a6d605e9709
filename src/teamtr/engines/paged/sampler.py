"""The sampler of a GPU: prefills what is not in the KV cache, then decodes with one captured graph per batch size.

The steps of a stream, numbered as in the code:

1. rows are admitted as far as pages suffice; cached prefixes are not computed again, and the episodes of a group share
   their prompt's pages;
2. all admitted rows draw their first token from the prefill;
3. the graph of the smallest captured size that holds all rows is replayed, a few tokens at a time; rows that begin with
   the same pages read them together;
4. rows that ended leave, their pages can be reused by later calls, and the remaining rows are compacted; the caller
   receives the finished messages and may request more rows, which are admitted as in 1.

Rows of one lane decode together: those of one agent, whose weights the copy holds, or those of all agents whose
adapters the copy applies row by row. A lane is sampled until it has no rows; then the lane with the most waiting rows
is next.

Every token is drawn with the number that the caller's noise holds for its row and position. The other rows, their order
and batch sizes change nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from teamtr.answers import Ended, Sample
from teamtr.engines.paged.buffers import SIZES, DecodeBuffers, Look
from teamtr.engines.paged.jobs import Job, MoreJobs, OpenRow, Speaker
from teamtr.engines.paged.layout import Decoding, Prefilling, portions
from teamtr.engines.paged.pages import Pool
from teamtr.engines.paged.weights import SamplingCopy
from teamtr.engines.paged.work_split import Cluster, clusters, most_members, remaining, spared, worth_sparing
from teamtr.engines.sampling import TokenSampler
from teamtr.engines.torch.attention import AttentionShape, Layout, attending, text_config
from teamtr.engines.transfer import send
from teamtr.errors import UserError
from teamtr.ports import Follow, Heard, unfollowed, unheard
from teamtr.progress import Work, working
from teamtr.randomness import lengths_of
from teamtr.types import Finish, Ids

PAGE = 64
PREFILL_TOKENS = 16_384
"""Maximum number of tokens of a prefill pass. Its memory does not grow with the length or the number of prompts."""
LOOK_EVERY = 16
"""Decode steps between two checks for ended rows."""
STEPS_AHEAD = 2
"""Steps that the card still has to compute when these checks are made."""


class Server:
    """Samples for all agents of one architecture.

    Args:
        copy: the model that computes.
        pool_bytes: memory limit of the KV pages.
        graphs: capture decode steps as graphs (CUDA only).
        compiled: compile the decoder before it is captured: takes a minute at first use, then decodes half again as
            fast.
        keeps: keep the features that tokens are drawn from until their message is complete, for speakers that use them.
    """

    def __init__(
        self, copy: SamplingCopy, *, pool_bytes: int, graphs: bool, compiled: bool = False, keeps: bool = False
    ) -> None:
        self.copy = copy
        self._shape = AttentionShape.of(text_config(copy.model))
        self.pool_bytes = pool_bytes
        self.keeps = keeps
        self._graphs = graphs
        self._pool: Pool | None = None
        self._buffers: DecodeBuffers | None = None
        decoder = copy.model.get_decoder()
        self._decoder: Callable[..., Any] = torch.compile(decoder, dynamic=None) if compiled else decoder
        self._compiled = compiled
        self._calls = 0

    @property
    def books(self) -> Any:
        """Bookkeeping of the pages; None before the first call."""
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
        """One message per prompt with the weights that the copy holds, identified by ``version``. ``heard`` and
        ``follow`` are as in ``ports.Sampler``."""
        return self.say(Speaker(version, drawing, end_ids), prompts, uniform_BT, heard=heard, follow=follow)

    def say(
        self,
        speaker: Speaker,
        prompts: Sequence[Ids],
        uniform_BT: NDArray[np.float64],
        *,
        heard: Heard = unheard,
        follow: Follow = unfollowed,
    ) -> list[Sample]:
        """One message of this speaker per prompt."""
        rows = zip(prompts, uniform_BT, lengths_of(uniform_BT), strict=True)
        jobs = [Job(speaker, prompt, noise_T[:tokens]) for prompt, noise_T, tokens in rows]
        samples: dict[int, Sample] = {}

        def more(ended: Sequence[Ended]) -> list[Job]:
            for one in ended:
                samples[one.row] = one.sample
                heard(one.row, one.sample)
            asked, jobs[:] = jobs.copy(), []
            return asked

        self.stream(more, follow=follow)
        return [samples[row] for row in range(len(prompts))]

    @torch.no_grad()
    def stream(self, more: MoreJobs, *, follow: Follow = unfollowed) -> None:
        """Sample messages until no more are requested, as ``ports.Sampler.stream``."""
        with working("tokens", 0, "tokens") as work:
            self._calls += 1
            running: list[OpenRow] = []
            try:
                self._decode(more, follow, running, work)
            except BaseException:
                self._forget(running)
                raise

    def _forget(self, running: Sequence[OpenRow]) -> None:
        """Release open rows after an error."""
        if self._pool is not None and self._buffers is not None:
            for sequence in running:
                self._pool.books.give_back(sequence.pages)
            self._buffers.clear(0)
            self._put_clusters([], 0)

    def _decode(self, more: MoreJobs, follow: Follow, running: list[OpenRow], work: Work) -> None:
        waiting: dict[Hashable, dict[int, Job]] = {}
        lane: Hashable = None
        present: set[Speaker] = set()  # speakers whose weights are loaded
        ended: list[Ended] = []
        rows = 0
        while True:
            for job in more(ended):
                waiting.setdefault(job.speaker.lane, {})[rows] = job
                work.expect(len(job.noise_T))
                rows += 1
            if not running:
                waiting = {lane: jobs for lane, jobs in waiting.items() if jobs}
                if not waiting:
                    return
                lane, present = max(waiting, key=lambda lane: (len(waiting[lane]), -min(waiting[lane]))), set()
            # 1. and 2. admit, and draw the first token from the prefill
            fresh = self._admit(waiting.get(lane, {}), running, present)
            running += fresh
            if fresh:
                self._share(running)  # meanwhile the card computes the prefill
            # 3. decode
            look, steps = self._advance(running)
            # 4. compact the batch
            alive = look.alive
            work.advance(len(fresh) + len(running) * steps)  # also counts rows that ended in between
            if follow is not unfollowed:
                alive = self._tell(running, alive, look, follow)
            ended = []
            if not all(alive):
                ended = self._leave(running, alive, look)
                self._put_clusters(remaining(self._require_buffers().clusters, alive), sum(alive))
                running[:] = [sequence for sequence, stays in zip(running, alive, strict=True) if stays]

    # -- 1. and 2. --------------------------------------------------------------------------------------------

    def _admit(self, waiting: dict[int, Job], running: Sequence[OpenRow], present: set[Speaker]) -> list[OpenRow]:
        """Admit as many waiting rows as pages and batch sizes allow, prefill them and draw their first token."""
        if not waiting:
            return []
        prompts, tokens = [len(job.prompt) for job in waiting.values()], max(len(j.noise_T) for j in waiting.values())
        if running:
            self._make_room(len(running) + len(prompts), tokens, self._width(max(prompts), tokens))
        else:
            self.reserve(prompts, tokens)
        for speaker in dict.fromkeys(job.speaker for job in waiting.values()):
            if speaker not in present:
                speaker.take_up()
                present.add(speaker)
        pool, books = self._require_pool(), self._require_pool().books
        taken = {sequence.slot for sequence in running}
        free = iter([slot for slot in range(SIZES[-1]) if slot not in taken])
        in_order = sorted(waiting, key=lambda r: (len(waiting[r].prompt), waiting[r].prompt.tobytes(), r))
        sequences: list[OpenRow] = []
        leader: dict[tuple[str, bytes], int] = {}  # (version, prompt) -> its first new sequence
        leads: list[int] = []  # for each sequence, the one whose hidden state it uses
        known: list[int] = []  # tokens of each leader's prompt that are already in pages
        copies: list[tuple[int, int]] = []
        for row in in_order[: SIZES[-1] - len(running)]:
            job, prompt = waiting[row], waiting[row].prompt
            version = job.speaker.version or f"call {self._calls} {job.speaker.lane!r}"
            pages_in_all = books.needed(len(prompt) + max(len(job.noise_T) - 1, 1))
            full, key = len(prompt) // PAGE, (version, prompt.tobytes())
            if key in leader:
                held = books.share(sequences[leader[key]].pages[:full])
            else:
                # At least the last token is computed: the first token is drawn from its hidden state.
                held = books.find(version, prompt[: (len(prompt) - 1) // PAGE * PAGE])
            if pages_in_all - len(held) > books.available and (running or sequences):
                books.give_back(held)
                break  # it is admitted once others have left
            own = held + books.take(pages_in_all - len(held))
            if key not in leader:
                leader[key] = len(sequences)
                known.append(len(held) * PAGE)
                # Named before they are computed, so that prompts with a common prefix share them in this call. Later
                # prompts are prefilled in a later pass, or in the same one, where a layer first writes all its keys.
                books.name(version, prompt[: full * PAGE], own)
            elif len(prompt) % PAGE:
                copies.append((sequences[leader[key]].pages[full], own[full]))
            leads.append(leader[key])
            sequences.append(OpenRow(row, job, version, own, next(free)))
            del waiting[row]
        if not sequences:
            return []
        try:
            hidden = self._prefill(sequences, list(leader.values()), known)
        except BaseException:
            self._pool = self._buffers = None  # pages that were named but not written must not be found
            raise
        pool.copy([s for s, _ in copies], [t for _, t in copies])
        self._seat(sequences, len(running), hidden, leads, list(leader.values()))
        return sequences

    def _prefill(self, sequences: Sequence[OpenRow], leaders: Sequence[int], known: Sequence[int]) -> Tensor:
        """Compute the tokens that are not in pages, in one or several passes; returns the last hidden state of each
        leader's prompt."""
        last: list[Tensor] = []
        leading = [sequences[leader] for leader in leaders]
        prompts = [(k, len(sequence.prompt)) for sequence, k in zip(leading, known, strict=True)]
        for part in portions(prompts, PREFILL_TOKENS):
            of = [leading[piece.prompt] for piece in part]
            counts = [piece.end - piece.start for piece in part]
            layout = Prefilling.of(
                self._require_pool(),
                [(one.pages, piece.start, piece.end) for one, piece in zip(of, part, strict=True)],
                self.copy.device,
            )
            said = [one.prompt[piece.start : piece.end] for one, piece in zip(of, part, strict=True)]
            ids = send(np.concatenate(said).astype(np.int64), self.copy.device)
            if self.copy.rows is not None:
                self.copy.rows.of_tokens([one.job.speaker.adapter for one in of], counts)
            hidden = self._hidden(layout, ids, layout.position_N)
            ends = [k for k, (one, piece) in enumerate(zip(of, part, strict=True)) if piece.end == len(one.prompt)]
            last.append(hidden[layout.last_R[ends]])
        return torch.cat(last)

    def _hidden(self, layout: Layout, ids_N: Tensor, position_N: Tensor) -> Tensor:
        """The last hidden states of packed tokens, [N, H]."""
        ids, position = ids_N[None], position_N[None]
        if self._compiled:
            torch._dynamo.mark_dynamic(ids, 1)
            torch._dynamo.mark_dynamic(position, 1)
            if self.copy.rows is not None:
                torch._dynamo.mark_dynamic(self.copy.rows.index_N, 0)
        with attending(self.copy.model, layout):
            hidden: Tensor = self._decoder(input_ids=ids, position_ids=position, use_cache=False).last_hidden_state
        return hidden[0]

    def _seat(
        self, sequences: Sequence[OpenRow], first: int, hidden: Tensor, leads: Sequence[int], leaders: Sequence[int]
    ) -> None:
        buffers = self._require_buffers()
        here = buffers.seat([sequence.seated for sequence in sequences], first)
        place = {leader: i for i, leader in enumerate(leaders)}
        at = send(np.array([place[lead] for lead in leads]), buffers.device)
        logits = self.copy.logits(hidden)[at]
        ids, logp = sequences[0].job.speaker.drawing(logits, buffers.next_uniform[here])
        buffers.record(here, ids, logp, hidden[at])

    # -- 3. ---------------------------------------------------------------------------------------------------

    def _advance(self, running: Sequence[OpenRow]) -> tuple[Look, int]:
        """Some steps of all rows. Returns their number, and a look at the rows that is taken before the last few of
        them, so that the card computes these while rows that ended leave; or after all, if no row can have more."""
        left, rows = max(0, *(sequence.left for sequence in running)), len(running)
        steps = min(LOOK_EVERY, left)
        ahead = min(STEPS_AHEAD, steps, left - steps)
        drawing, buffers = running[0].job.speaker.drawing, self._require_buffers()
        for _ in range(steps - ahead):
            self._replay(rows, drawing)
        look = buffers.look(rows)
        for _ in range(ahead):
            self._replay(rows, drawing)
        for sequence in running:
            sequence.drawn += steps
        return look, steps

    def _replay(self, sequences: int, drawing: TokenSampler) -> None:
        size = _size(sequences)
        if not self._graphs:
            self._step(size, drawing)
            return
        graphs = self._require_buffers().graphs
        key = (size, drawing, self._reads_together())
        if key not in graphs:
            graphs[key] = self._capture(size, drawing)
        graphs[key].replay()

    def _share(self, sequences: Sequence[OpenRow]) -> None:
        """Find rows that begin with the same pages. Called whenever rows were admitted; when rows leave, the others
        stay in their clusters."""
        pages = [sequence.pages for sequence in sequences]
        self._put_clusters(clusters(pages, self._require_buffers().members), len(pages))

    def _put_clusters(self, found: list[Cluster], rows: int) -> None:
        """Use these clusters, or none if they save too little for this number of rows."""
        buffers = self._require_buffers()
        in_a_layer = Pool.bytes_per_page(self._shape, PAGE, self.copy.dtype) // self._shape.layers
        if rows == 0 or spared(found) * in_a_layer < worth_sparing(_size(rows), self._shape.kv_heads):
            found = []
        if found or buffers.clusters:
            buffers.together.put(found)
        buffers.clusters = found

    def _reads_together(self) -> bool:
        return bool(self._require_buffers().clusters)

    def _step(self, size: int, drawing: TokenSampler) -> None:
        """One token for the first ``size`` seats."""
        buffers = self._require_buffers()
        together = buffers.together.of(size) if self._reads_together() else None
        layout = Decoding(self._require_pool(), buffers.table[:size], buffers.position[:size], together)
        if self.copy.rows is not None:
            self.copy.rows.index_N = buffers.adapter[:size]
        # Models that torch computes may use positions as indices, which must be long; our kernels take any integers.
        position = buffers.position[:size] if self.copy.joined else buffers.position[:size].long()
        hidden = self._hidden(layout, buffers.token[:size], position)
        ids, logp = drawing(self.copy.logits(hidden), buffers.next_uniform[:size])
        buffers.record(slice(0, size), ids, logp, hidden, fed=True)

    def _capture(self, size: int, drawing: TokenSampler) -> Any:
        """Capture a step. All seats are inactive during the warm-up: it writes to pages only what the real step writes
        there again, and advances nothing."""
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

    def _tell(self, running: Sequence[OpenRow], alive: Sequence[bool], look: Look, follow: Follow) -> list[bool]:
        """Report the tokens between the last two looks to ``follow``; returns which rows continue. A row that
        ``follow`` no longer wants leaves as if it had ended."""
        written = look.positions
        most = max(upto - len(sequence.prompt) for sequence, upto in zip(running, written, strict=True)) + 1
        ids, _ = self._require_buffers().said([sequence.slot for sequence in running], most, look)
        goes_on = []
        for sequence, stays, position, said in zip(running, alive, written, ids, strict=True):
            before, upto = sequence.told, position - len(sequence.prompt) + 1
            sequence.told = upto
            wanted = upto == before or follow(sequence.row, before, said[before:upto].copy())
            goes_on.append(stays and wanted)
        return goes_on

    def _leave(self, running: Sequence[OpenRow], alive: Sequence[bool], look: Look) -> list[Ended]:
        """Remove the rows that ended and release their pages; returns their messages."""
        buffers, books = self._require_buffers(), self._require_pool().books
        gone, written = [i for i, stays in enumerate(alive) if not stays], look.positions
        most = max(written[i] - len(running[i].prompt) for i in gone) + 1  # buffers are longer than messages
        ids, logp = buffers.said([running[i].slot for i in gone], most, look)
        ended: list[Ended] = []
        for i, said, logprobs in zip(gone, ids, logp, strict=True):
            sequence = running[i]
            # The last token drawn was never fed to the model, so it has no key and value.
            fed = written[i] - len(sequence.prompt)
            books.name(sequence.version, np.concatenate([sequence.prompt, said[:fed]]), sequence.pages)
            books.give_back(sequence.pages)
            finish: Finish = "stop" if int(said[fed]) in sequence.job.speaker.end_ids else "length"
            sample = Sample(said[: fed + 1].copy(), logprobs[: fed + 1].copy(), finish)
            ended.append(Ended(sequence.row, sample))
            self._keep(sequence, sample)
        buffers.keep([i for i, stays in enumerate(alive) if stays])
        return ended

    def _keep(self, sequence: OpenRow, sample: Sample) -> None:
        speaker, kept = sequence.job.speaker, self._require_buffers().kept
        if speaker.keep is not None and speaker.version:
            assert kept is not None, "this server was made without keeps"
            features_TH = kept[sequence.slot, : len(sample.token_ids)].clone()
            speaker.keep(speaker.version, sequence.prompt, sample.token_ids, features_TH)

    # -- memory -----------------------------------------------------------------------------------------------

    def forget_pages(self) -> None:
        """Drop cached prefixes; called between streams."""
        if self._pool is not None:
            self._pool.books.forget()

    def reserve(self, prompts: Sequence[int], tokens: int) -> None:
        """Allocate pages and buffers for a call with prompts of these lengths, if the present ones are too small; never
        more than the budget."""
        pages = [self._width(length, tokens) - 1 for length in prompts]
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
            # Extra pages for prefixes to reuse: in the group's next turn, and in the next batch.
            count = min(affordable, 4 * wanted)
            try:
                self._pool = Pool(self._shape, count, PAGE, self.copy.dtype, self.copy.device)
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"{count * per_page / 2**30:.2g} GB of keys and values do not fit into the memory that is free on "
                    f"{self.copy.device}; lower sampling.memory_gb or the number of episodes"
                ) from error
        self._make_room(len(prompts), tokens, max(pages) + 1)

    def _width(self, prompt: int, tokens: int) -> int:
        """Columns of a page table: one more than pages, because a row that has reached its limit may stay for some
        steps and writes behind its last page."""
        return -(-(prompt + max(tokens - 1, 1)) // PAGE) + 1

    def _make_room(self, rows: int, tokens: int, width: int) -> None:
        """Ensure that buffers hold this many rows; larger buffers take over the open rows."""
        rows, old = min(rows, SIZES[-1]), self._buffers
        if old is not None and old.fits(rows, tokens, width):
            return
        self._buffers = DecodeBuffers(
            rows=roomy(rows, old.rows if old else 0),
            tokens=roomy(tokens, old.tokens if old else 0),
            width=roomy(width, old.width if old else 0),
            members=most_members(self._shape.heads // self._shape.kv_heads, self.copy.dtype),
            device=self.copy.device,
            kept_width=text_config(self.copy.model).hidden_size if self.keeps else 0,
            kept_dtype=self.copy.dtype,
        )
        if old is not None:
            self._buffers.copy_from(old)

    def _require_pool(self) -> Pool:
        assert self._pool is not None
        return self._pool

    def _require_buffers(self) -> DecodeBuffers:
        assert self._buffers is not None
        return self._buffers


def _size(rows: int) -> int:
    """The smallest captured size that holds this many rows."""
    return next(size for size in SIZES if size >= rows)


def roomy(needed: int, had: int = 0) -> int:
    """The smallest power of two that holds both. Growth discards the captured graphs, so it should be rare."""
    return 1 << (max(needed, had, 1) - 1).bit_length()
