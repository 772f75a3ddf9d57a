"""Several servers as one: every call goes to all of them at once.

With policy `all` any failure is everybody's. With `quorum` and `best_effort` whole servers that failed are left out
and the rest commit; a server's own ranks are always unanimous. Who takes part is decided when a link is opened:

    open a link   every server is asked whether it is there; those that do not answer are left out of this link
    a round       where the transport can, it goes on without a server that is lost meanwhile
    a round fails `persist` finds whose failure it was, leaves that server out and tries again: the link is opened anew
    next round    a server that was left out and answers again is taken in: the link is opened anew
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, TypeVar, get_args

from weightwire.clients.parallel import Call, ParallelCalls
from weightwire.clients.protocol import ControlClient, PauseMode
from weightwire.errors import MessageError, NotInitialised, PeerLost, WeightwireError
from weightwire.messages import WeightTransferUpdatePayload
from weightwire.report import ServerOutcome

Policy = Literal["all", "quorum", "best_effort"]

_RETURN_SECONDS = 1.0
"""How long a server that was left out may take to say that it is back; every round waits for it."""
_STRAGGLER_SECONDS = 5.0
"""How long a start waits for calls of an update that failed on another server."""
_WORDS_SECONDS = 0.3
"""How long after its answer a server's ranks may take to say that the round goes on without it."""
_WORKER = re.compile(r"worker rank (\d+)")

T = TypeVar("T")


class _OtherMembers(NotInitialised):
    """Other servers take part than in the open link."""


class FanoutClient:
    """Drives several servers as one; worker ranks are counted through in the order of `clients`.

    Args:
        clients: One client per server. Under policy `all` the list may be changed between updates: a server that is
            gone is left out of the next link by removing its client.
        policy: `"all"`: every server commits or none. `"quorum"`: more than half of them. `"best_effort"`: those that
            can, if it is only one. Under the last two run `trainer_init` and `send_weights` through `persist`.
        patience: Seconds that a server may take to say that it is there before it is left out.

    Raises:
        MessageError: No client, or no such policy.
    """

    def __init__(self, clients: Sequence[ControlClient], policy: Policy = "all", *, patience: float = 5.0) -> None:
        if not clients:
            raise MessageError("FanoutClient needs at least one client")
        if policy not in get_args(Policy):
            raise MessageError(f"policy must be one of {', '.join(get_args(Policy))}, got {policy!r}")
        self.clients = list(clients)
        self.policy = policy
        self.patience = patience
        self._present = list(range(len(self.clients)))
        self._linked: dict[int, range] = {}
        self._silent: dict[int, str] = {}
        self._failed: dict[int, str] = {}
        self._error: tuple[int, BaseException] | None = None
        self._unfinished: ParallelCalls | None = None
        self._calls: ParallelCalls | None = None
        self._parted: frozenset[int] = frozenset()
        self._lost: Callable[[int, WeightwireError], bool] | None = None

    # Who takes part

    def persist(self, attempt: Callable[[], T]) -> T:
        """Run `attempt`, and again without the servers that failed, for as long as the policy allows.

        Use it around `trainer_init` and around each `send_weights`:

            engine = client.persist(lambda: WeightTransferTrainerFactory.trainer_init(info, client=client, source=s))
            report = client.persist(lambda: engine.send_weights(weight_version="step-1"))

        Every attempt has a deadline of its own. Servers left out here are asked again by the next `persist`.

        Raises:
            BaseException: What `attempt` raised, if it was no server's failure or too few servers are left.
        """
        self._failed = {}
        while True:
            try:
                return attempt()
            except _OtherMembers:
                continue
            except WeightwireError as error:
                if self.policy == "all" or not self._leave_out(error):
                    raise

    def let_servers_go(self, lost: Callable[[int, WeightwireError], bool]) -> tuple[list[range], int] | None:
        """Go on without a server that is lost, until the next link is opened.

        Args:
            lost: Asked about a server that does not answer, by its first worker rank and the reason: whether the ranks
                go on without it. They say so themselves with `leave_out`.

        Returns:
            The worker ranks of each server, and how many servers have to stay; None if it has to be all.
        """
        if self.policy == "all":
            return None
        self._lost = lost
        return list(self._linked.values()), len(self.clients) // 2 + 1 if self.policy == "quorum" else 1

    def leave_out(self, workers: Collection[int], error: WeightwireError) -> None:
        """Wait for the servers of these worker ranks no longer, in this link. From any thread."""
        gone = {at: str(error) for at, ranks in self._linked.items() if not set(workers).isdisjoint(ranks)}
        self._linked = {at: ranks for at, ranks in self._linked.items() if at not in gone}
        self._failed = {**self._failed, **gone}
        self._parted = self._parted | gone.keys()
        if (calls := self._calls) is not None:
            for at in gone:
                calls.forget(at)

    def outcomes(self) -> tuple[ServerOutcome, ...]:
        """How each server came out of the last round, in the order of `clients`."""
        return tuple(
            ServerOutcome(server=self._name(at), workers=tuple(self._linked[at]))
            if at in self._linked
            else ServerOutcome(server=self._name(at), error=self._reason(at))
            for at in range(len(self.clients))
        )

    def _reason(self, at: int) -> str:
        return self._failed.get(at) or self._silent.get(at) or "it is in no link"

    def _name(self, at: int) -> str:
        return str(getattr(self.clients[at], "base_url", None) or f"server {at + 1} of {len(self.clients)}")

    def _leave_out(self, error: WeightwireError) -> bool:
        """Find the servers whose failure `error` is, and leave them out; returns whether there are any.

        Raises:
            PeerLost: Too few are left for the policy.
        """
        taking_part = [at for at in self._linked or self._present if at not in self._failed]
        _, silent = self._probe(taking_part, self.patience)
        culprit = self._culprit(error)
        found = {at: str(error) if at == culprit else words for at, words in silent.items()}
        if not found and culprit in taking_part:
            found = {culprit: str(error)}
        self._failed |= found
        left = len(self.clients) - len(self._failed.keys() | self._silent.keys())
        if found and not self._enough(left):
            raise self._too_few(left) from error
        return bool(found)

    def _culprit(self, error: WeightwireError) -> int | None:
        """The server that `error` is about: by the worker rank it names, else by whose call raised it."""
        for text in (error.message, error.rank or ""):
            if named := _WORKER.search(text):
                return next((at for at, ranks in self._linked.items() if int(named[1]) in ranks), None)
        if self._error is not None and self._error[1] in (error, error.__cause__):
            return self._error[0]
        return None

    def _enough(self, count: int) -> bool:
        return count > len(self.clients) / 2 if self.policy == "quorum" else count > 0

    def _too_few(self, count: int) -> PeerLost:
        reasons = "; ".join(f"{self._name(at)}: {words}" for at, words in (self._silent | self._failed).items())
        return PeerLost(
            f"policy {self.policy!r} is not met: {count} of {len(self.clients)} servers are left ({reasons})"
        )

    def _choose(self) -> dict[int, int]:
        """Ask every server that has not failed whether it is there; returns places and numbers of workers."""
        asked = [at for at in range(len(self.clients)) if at not in self._failed]
        sizes, self._silent = self._probe(asked, self.patience)
        if not self._enough(len(sizes)):
            raise self._too_few(len(sizes))
        self._present = list(sizes)
        return sizes

    def _probe(self, places: Sequence[int], seconds: float) -> tuple[dict[int, int], dict[int, str]]:
        """Numbers of workers of those that answer in time, and why the others do not."""
        calls = ParallelCalls(self.clients, places, lambda client, at: client.get_world_size(include_dp=True))
        results, errors = calls.wait(seconds)
        late = f"it did not answer within {seconds:g} s"
        silent = {at: str(errors.get(at, late)) for at in places if at not in results}
        return {at: results[at] for at in places if at in results}, silent

    def _sizes(self) -> dict[int, int]:
        if self.policy == "all":
            return self._all(lambda client, at: client.get_world_size(include_dp=True), range(len(self.clients)))
        return self._choose()

    def _check_membership(self) -> None:
        """Have the trainer open its link again where other servers should be in it."""
        if self.policy == "all":
            return
        if not self._linked:
            raise _OtherMembers("no link is open to the servers of this client")
        outside = [at for at in range(len(self.clients)) if at not in self._linked and at not in self._failed]
        back, self._silent = self._probe(outside, min(_RETURN_SECONDS, self.patience))
        if back or self._failed.keys() & self._linked.keys():
            changed = ", ".join(map(self._name, back or self._failed))
            raise _OtherMembers(f"the link is opened again: {changed} {'came back' if back else 'failed'}")

    # The calls

    def _all(self, call: Call, places: Sequence[int]) -> dict[int, Any]:
        """Run `call(client, place)` for all places at once; raises the first error as soon as there is one.

        The other calls are not waited for then: they may be waiting for the server that failed.
        """
        calls = self._calls = ParallelCalls(self.clients, places, call)
        for at in self._parted:  # also what was left out before the calls could be told
            calls.forget(at)
        while True:
            results, errors = calls.wait(None)
            if not errors:
                return {at: results[at] for at in places if at in results}
            at, error = next(iter(errors.items()))
            if not self._goes_on_without(calls, at, error):
                self._error, self._unfinished = (at, error), calls
                raise error

    def _goes_on_without(self, calls: ParallelCalls, at: int, error: BaseException) -> bool:
        """Whether the ranks do; what they say of a worker travels beside its server's answer."""
        if self._lost is None:
            return False
        if calls.forgotten(at, _WORDS_SECONDS):
            return True
        if not isinstance(error, PeerLost) or at not in self._linked:
            return False
        return self._lost(self._linked[at].start, error) and calls.forgotten(at, _WORDS_SECONDS)

    def _there(self) -> list[int]:
        return list(range(len(self.clients)) if self.policy == "all" else self._choose())

    def _linked_ones(self) -> list[int]:
        return list(range(len(self.clients)) if self.policy == "all" else self._linked)

    def init_weight_transfer_engine(self, init_info: dict[str, Any], *, timeout: float | None = None) -> None:
        """Connect every server, each with the rank offset of its place."""
        sizes = self._sizes()
        self._lost, self._parted = None, frozenset()
        before, self._linked = 0, {}
        for at, size in sizes.items():
            self._linked[at] = range(before, before + size)
            before += size

        def initialise(client: ControlClient, at: int) -> None:
            offset = self._linked[at].start
            mine = copy.deepcopy(init_info)
            if isinstance(mine.get("rank_offset"), int):
                mine["rank_offset"] += offset
            if isinstance(mine.get("weightwire"), dict):
                mine["weightwire"]["worker_offset"] = mine["weightwire"].get("worker_offset", 0) + offset
            client.init_weight_transfer_engine(mine, timeout=timeout)

        self._all(initialise, list(sizes))

    def start_weight_update(
        self, *, update_id: str | None = None, draft: bool = False, timeout: float | None = None
    ) -> None:
        """Open an update on every server.

        Raises:
            NotInitialised: Other servers take part than in the open link; a trainer engine opens it again by itself.
        """
        self._check_membership()
        if self._unfinished is not None:
            # What failed on one server may still be under way on another, where a start would meet it.
            self._unfinished.wait(_STRAGGLER_SECONDS if timeout is None else min(timeout, _STRAGGLER_SECONDS))
            self._unfinished = None
        self._all(
            lambda client, at: client.start_weight_update(update_id=update_id, draft=draft, timeout=timeout),
            self._linked_ones(),
        )

    def update_weights(
        self,
        update_info: WeightTransferUpdatePayload,
        *,
        update_id: str | None = None,
        sequence: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Have every server receive one message; a list has one element per worker rank of all servers."""
        places = self._linked_ones()
        parts: dict[int, Any] = dict.fromkeys(places, update_info)
        if isinstance(update_info, list):
            sizes = self._all(lambda client, at: client.get_world_size(include_dp=True), places)
            if len(update_info) != sum(sizes.values()):
                raise MessageError(
                    f"update_info lists {len(update_info)} elements for {sum(sizes.values())} workers: give one per "
                    "worker rank"
                )
            rest = iter(update_info)
            parts = {at: [next(rest) for _ in range(size)] for at, size in sizes.items()}
        self._all(
            lambda client, at: client.update_weights(
                parts[at], update_id=update_id, sequence=sequence, timeout=timeout
            ),
            places,
        )

    def finish_weight_update(
        self, weight_version: str | None = None, *, update_id: str | None = None, timeout: float | None = None
    ) -> None:
        """Have every server commit."""
        self._all(
            lambda client, at: client.finish_weight_update(weight_version, update_id=update_id, timeout=timeout),
            self._linked_ones(),
        )

    def abort_weight_update(self, *, update_id: str | None = None, timeout: float | None = None) -> None:
        """Have every server drop the open update."""
        self._all(
            lambda client, at: client.abort_weight_update(update_id=update_id, timeout=timeout), self._linked_ones()
        )

    def shutdown_weight_transfer_engine(self, *, timeout: float | None = None) -> None:
        """Have every server leave the trainer."""
        self._all(lambda client, at: client.shutdown_weight_transfer_engine(timeout=timeout), self._linked_ones())

    def get_world_size(self, include_dp: bool = True) -> int:
        """Worker ranks of all servers together; of those that are there, unless the policy is `all`.

        Raises:
            PeerLost: Too few servers are there for the policy.
        """
        if include_dp:
            return sum(self._sizes().values())
        return sum(self._all(lambda client, at: client.get_world_size(include_dp=False), self._there()).values())

    def weight_info(self) -> dict[str, Any]:
        """What each server says, under `servers`, and the first one's label and revision.

        Unless the policy is `all`, a server that does not answer is `{"error": its words}` there.
        """
        places = range(len(self.clients))
        if self.policy == "all":
            answers = list(self._all(lambda client, at: client.weight_info(), places).values())
            return {**answers[0], "servers": answers}
        calls = ParallelCalls(self.clients, places, lambda client, at: client.weight_info())
        results, errors = calls.wait(self.patience)
        lost = {at: {"error": str(errors.get(at) or "it did not answer")} for at in places}
        first: dict[str, Any] = next(iter(results.values()), {})
        return {**first, "servers": [results.get(at) or lost[at] for at in places]}

    def pause(self, mode: PauseMode = "abort", *, timeout: float | None = None) -> None:
        """Keep readers out of every server; of those that are there, unless the policy is `all`."""
        self._all(lambda client, at: client.pause(mode, timeout=timeout), self._there())

    def resume(self, *, timeout: float | None = None) -> None:
        """Let readers into every server again, also one that was left out meanwhile, if it can be reached."""
        if self.policy == "all":
            self._all(lambda client, at: client.resume(timeout=timeout), range(len(self.clients)))
            return
        calls = ParallelCalls(self.clients, range(len(self.clients)), lambda client, at: client.resume(timeout=timeout))
        for at, error in calls.wait(self.patience)[1].items():
            if at in self._linked:
                raise error
