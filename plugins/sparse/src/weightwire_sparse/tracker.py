"""Finding what has changed of one sender's weights, whoever still holds which state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Literal

from weightwire.errors import MessageError
from weightwire.source import WeightSource
from weightwire_sparse.changes import Bytes, Changes
from weightwire_sparse.finding import KernelChoice, kernel_for, without
from weightwire_sparse.history import History
from weightwire_sparse.local_pieces import LocalPieces
from weightwire_sparse.looking import LookAhead
from weightwire_sparse.memory import Pool, Recorder
from weightwire_sparse.pieces import Integers
from weightwire_sparse.samples import Samples
from weightwire_sparse.snapshot import CopySnapshot, Part, Snapshot, snapshot_of
from weightwire_sparse.sweep import Sweep
from weightwire_sparse.taking import Taking
from weightwire_sparse.threads import Threads

_LEAST_HISTORY = 16 << 20


class DeltaTracker:
    """What changes in a source's local tensors, bit for bit.

    A snapshot holds what was there at the last look. `find` compares with it, makes it equal to what is there now and
    adds the addresses where they differed to a history; `since` gives everything that changed after any earlier mark
    that the history still reaches, with present values. So nothing has to be taken back where a round fails: those who
    missed it are sent what changed since the mark that they are at. An error in between leaves no snapshot rather than
    a wrong one: `ready` is False until the next `take`.

    Memory is compared by several threads, and without a gather of what is sharded. `look` lets it begin before `find`
    is called. All else is called by one thread at a time.

    Args:
        source: The weights; may be replaced by another with the same metadata.
        rank: The trainer rank that this is.
        trainers: How many trainer ranks there are.
        snapshot: "copy" holds as much host memory as this rank sends; "hash" holds a digest for each block, about a
            thousandth of that: all elements of a changed block count as changed, and nothing older than the last find
            is known.
        kernels: What compares: numba (the extra `fast`), numpy, or the first of them that is installed.
        threads: How many threads compare.
        history_bytes: What the addresses of earlier finds and the values of the last take at most; as much as this
            rank sends unless given, but 16 MiB at least. More changes than fit make the next round a dense one.
        block_bytes: Of a block with a digest.

    Attributes:
        source: See above.
        space: The pieces that this rank sends.
        kernels: What compares.

    Raises:
        MessageError: An option that cannot be; numba is asked for and not installed.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        rank: int = 0,
        trainers: int = 1,
        snapshot: Literal["copy", "hash"] = "copy",
        kernels: KernelChoice = "auto",
        threads: int = 2,
        history_bytes: int | None = None,
        block_bytes: int = 16 << 10,
    ) -> None:
        _check(snapshot, threads, history_bytes, block_bytes)
        self.source = source
        self._local = LocalPieces(source.metadata, rank, trainers)
        self.space = self._local.space
        self._kernel = kernel_for(kernels, set(self.space.widths.tolist()))
        self.kernels: Literal["numpy", "numba"] = self._kernel.name
        self._block = block_bytes if snapshot == "hash" else None
        self._limit = max(self.space.nbytes, _LEAST_HISTORY) if history_bytes is None else history_bytes
        self._pool = Pool()
        self._history = History(self._limit, self._pool, only_last=snapshot == "hash")
        self._threads = Threads(threads)
        self._samples: Samples | None = None
        self._snapshot: Snapshot | None = None
        self._taking: Taking | None = None
        self._recorder = Recorder(self._limit, self._pool)
        self._lock = threading.Lock()
        self._busy = False
        self._ahead: LookAhead | None = None
        self._mark = 0
        self._tidied_mark, self._tidied = 0, Future[None]()
        self._tidied.set_result(None)
        self.ready = False
        """Whether there is a snapshot that `find` can compare with."""

    @property
    def oldest(self) -> int | None:
        """The first mark that `since` still answers for; None without a snapshot."""
        return self._history.oldest if self.ready else None

    @property
    def snapshot_bytes(self) -> int:
        """Memory of the snapshot."""
        return 0 if self._snapshot is None else self._snapshot.nbytes

    @property
    def history_held_bytes(self) -> int:
        """Memory of the history."""
        return self._history.nbytes

    @property
    def holds_pieces(self) -> bool:
        """Whether the snapshot has the content of every piece."""
        return self.ready and isinstance(self._snapshot, CopySnapshot)

    def held(self, number: int) -> Bytes:
        """All bytes of a piece as the last `find` or `take` saw them: a view, to be read before the next one."""
        self._settle()
        assert isinstance(self._snapshot, CopySnapshot), "only a copy has them"
        return self._snapshot.piece(number)

    def find(self) -> int:
        """Find what differs from the snapshot, which becomes what is there now.

        Goes over all of the source, also what other ranks send, so that gathers line up.

        Returns:
            The mark of what is there now, one more than the last.

        Raises:
            SourceMismatch: The source yields something other than it declares.
            Exception: Whatever the source, or a comparison begun by `look`, raised. There is no snapshot then.
        """
        assert self.ready, "nothing to compare with: take() first"
        with self._alone() as ahead:
            recorder, self._recorder = self._recorder, Recorder(self._limit, self._pool)
            self._settle()
            found = self._compare(recorder, ahead)
            self._kernel.rest()
            self._mark += 1
            if recorder.overflowed:
                self.ready = False
                self._history.restart(self._mark)
            else:
                self._history.append(self._mark, found)
            self._pool.trim(4 * recorder.nbytes)
            return self._mark

    def tidy(self) -> None:
        """Have a thread bring the snapshot up to what was found last, and make that small.

        May be called once `since` is done with; otherwise the next `find` begins with it.
        """
        if self._tidied_mark != self._mark and self._snapshot is not None and self.ready:
            self._tidied_mark = self._mark
            self._tidied = self._threads.submit(partial(_tidy, self._snapshot, self._history, self._pool))

    def _settle(self) -> None:
        """Wait until the snapshot has what was found last."""
        self.tidy()
        self._tidied.result()

    def since(self, mark: int) -> Changes | None:
        """Everything found after `mark`, each address once, with present values.

        Returns:
            The changes; None where they are not known any more, and only a dense round is right.
        """
        assert mark <= self._mark, f"mark {mark} was never given, the last is {self._mark}"
        self._tidied.result()
        return self._history.since(mark, self._gather, self._threads) if self.ready else None

    def take(self, *, hold: bool = True) -> int:
        """Make the snapshot what is there now, for a dense round; nothing before is known afterwards.

        Args:
            hold: False keeps no snapshot: `ready` is False, and its memory is free for something else.

        Returns:
            The mark of what is there now.

        Raises:
            SourceMismatch: The source yields something other than it declares.
            Exception: Whatever the source raised. There is no snapshot then.
        """
        taking = self.taking(hold=hold)
        for number, tensor in self._local.each(self.source):
            taking.piece(self.space.pieces[number].place, tensor)
        return taking.done()

    def taking(self, *, hold: bool = True) -> Taking:
        """As `take`, by a caller who goes over the source anyway; until it is done there is no snapshot.

        Args:
            hold: See `take`.
        """
        with self._alone() as ahead:
            self._tidied.exception()  # whatever came of it: nobody else writes to the snapshot now
            self.ready = False
            if self._taking is not None:
                self._taking.abandon()
            if ahead is not None:
                ahead.abandon()
            self._history.restart(self._mark)
            self._recorder = Recorder(self._limit, self._pool)
            if not hold:
                self._snapshot = None
            elif self._snapshot is None:
                self._snapshot = snapshot_of(self.space, self._kernel, self._block)
            sweep = None if self._snapshot is None else self._sweep(self._snapshot.copy)
            self._taking = Taking(self.space, sweep, self._taken)
            return self._taking

    def look(self, names: Iterable[str]) -> None:
        """Say that parameters will not change before the next `find`: comparing them begins at once.

        May be called from any thread, such as an optimiser's hook, and returns at once. A parameter that torch knows
        to have changed since, or that is another tensor, is compared again by `find`; what is written past torch's
        version counter (through `tensor.data`, a numpy view or a pointer) is left to the find after it. Ignored
        where there is nothing to compare with, or the source makes tensors as they are asked for.

        Args:
            names: Parameters; those that this rank does not send are left out.

        Raises:
            MessageError: There is no such parameter.
        """
        numbers = self._local.numbers(names)
        with self._lock:
            if self._busy or not self.ready:
                return
            self.tidy()
            if self._ahead is None:
                sweep = partial(self._comparing, self._recorder, after=self._tidied)
                self._ahead = LookAhead(partial(self._local.watched, self.source), sweep)
            self._ahead.look(numbers)

    def sampled(self) -> float | None:
        """How much of a thousandth of the elements differs from when this was last called.

        Returns:
            A share; None the first time, or if the source makes tensors as they are asked for.

        Raises:
            SourceMismatch: The source holds something other than it declares.
        """
        resident = self._local.resident(self.source)
        if resident is None:
            return None
        if self._samples is None:
            self._samples = Samples(self.space)
        return self._samples.differing(resident.__getitem__)

    def shutdown(self) -> None:
        """End the threads, and let go of the snapshot."""
        self._forget()
        self._threads.shutdown()

    def _compare(self, recorder: Recorder, ahead: LookAhead | None) -> list[Changes]:
        earlier = [] if ahead is None else ahead.finish()
        sweep, again = self._comparing(recorder), set[int]()
        try:
            for number, tensor in self._local.each(self.source):
                if ahead is None or not ahead.touched(number):
                    sweep.add(number, tensor)
                elif not ahead.stands(number, tensor):
                    again.add(number)
                    sweep.add(number, tensor)
            found = sweep.finish()
        except BaseException:
            sweep.abandon()
            raise
        # The snapshot is what it was before anybody looked: what is compared again is found in full.
        kept = [part for changes in earlier for part in without(changes, self.space, again)] if again else earlier
        return kept + found

    def _comparing(self, recorder: Recorder, *, after: Future[None] | None = None) -> Sweep:
        """A sweep that compares; `after` something, it never waits for room."""
        assert self._snapshot is not None
        compare = partial(self._snapshot.compare, recorder)
        if after is None:
            return self._sweep(compare)

        def compare_afterwards(part: Part) -> list[Changes]:
            after.result()
            return compare(part)

        return self._sweep(compare_afterwards, bounded=False)

    def _sweep(self, work: Callable[[Part], list[Changes]], *, bounded: bool = True) -> Sweep:
        assert self._snapshot is not None
        grain, merges = self._snapshot.grain, self._snapshot.merges
        return Sweep(self.space, self._threads, work, grain=grain, merges=merges, bounded=bounded)

    def _taken(self, taking: Taking) -> int:
        assert taking is self._taking, "another snapshot was begun since"
        with self._alone():
            taking.complete()
            self._taking = None
            self._mark += 1
            self._history.restart(self._mark)
            self.ready = self._snapshot is not None
            return self._mark

    @contextmanager
    def _alone(self) -> Iterator[LookAhead | None]:
        """Nobody looks ahead meanwhile; gives what was looked at before. An error leaves no snapshot."""
        with self._lock:
            assert not self._busy, "a tracker finds or takes one thing at a time"
            self._busy, ahead, self._ahead = True, self._ahead, None
        try:
            yield ahead
        except BaseException:
            if ahead is not None:
                ahead.abandon()
            self._forget()
            raise
        finally:
            with self._lock:
                self._busy = False

    def _forget(self) -> None:
        # The memory as well: a thread may still be at work in it.
        self.ready, self._snapshot = False, None
        self._history.restart(self._mark)
        self._recorder = Recorder(self._limit, self._pool)
        self._pool.trim(0)

    def _gather(self, addresses: Integers) -> Bytes:
        self._settle()
        assert isinstance(self._snapshot, CopySnapshot)
        return self._snapshot.gather(addresses, self._pool)


def _tidy(snapshot: Snapshot, history: History, pool: Pool) -> None:
    snapshot.advance(history.last, pool)
    history.compact()


def _check(snapshot: str, threads: int, history_bytes: int | None, block_bytes: int) -> None:
    problem = None
    if snapshot not in ("copy", "hash"):
        problem = f'snapshot is "copy" or "hash", not {snapshot!r}'
    elif threads < 1:
        problem = f"threads must be at least 1, not {threads}"
    elif history_bytes is not None and history_bytes < 0:
        problem = f"history_bytes must not be negative, it is {history_bytes}"
    elif block_bytes < 16 or block_bytes % 16:
        problem = f"block_bytes must be a multiple of 16, not {block_bytes}"
    if problem is not None:
        raise MessageError(problem, transport="sparse_nccl")
