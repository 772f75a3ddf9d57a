"""What `weightwire push` does once it knows what is wanted."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from weightwire.clients.fanout import FanoutClient, Policy
from weightwire.clients.protocol import PauseMode
from weightwire.deadline import Deadline
from weightwire.errors import WeightwireError
from weightwire.registry import WeightTransferTrainerFactory, engine_class
from weightwire.report import TransferReport
from weightwire.source import WeightSource
from weightwire.trainer import TrainerWeightTransferEngine
from weightwire_cli.comparison import Finding, digests_of
from weightwire_cli.dry_run import plan_push
from weightwire_cli.progress import TransferProgress
from weightwire_cli.push_report import Infos, push_record, show_plan, show_push
from weightwire_cli.reporting import FAILED, LEFT_OUT, print_json, words_of
from weightwire_cli.selection import open_source
from weightwire_cli.servers import Server, ask_all, connect, demand, own_address
from weightwire_cli.verifying import findings_of

_ANSWER_SECONDS = 5.0
"""How long a server may take to say what it holds: one that was left out because it stopped is asked too."""
_PARTING_SECONDS = 1.0
"""The same after Ctrl-C."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """What the user asked for; see `weightwire push --help`."""

    path: str
    urls: tuple[str, ...]
    backend: str
    only: tuple[str, ...]
    label: str | None
    pause: PauseMode | None
    verify: bool
    policy: Literal["all", "quorum", "best-effort"]
    address: str | None
    device: str
    takeover: bool
    timeout: float
    token: str | None
    token_file: Path | None
    as_json: bool

    def source(self) -> WeightSource:
        """What is sent."""
        return open_source(self.path, only=self.only, device=self.device)

    def servers(self) -> list[Server]:
        """Clients of the servers."""
        return connect(self.urls, token=self.token, token_file=self.token_file, timeout=self.timeout)


def dry(options: PushOptions) -> int:
    """Say what a push would do; returns the exit status.

    Raises:
        WeightwireError: The checkpoint is not what it says, or a server does not answer.
    """
    source, partial = options.source(), bool(options.only)
    servers = options.servers()
    plans = demand(ask_all(servers, lambda server: plan_push(server, source.metadata, partial=partial)))
    if options.as_json:
        nbytes = sum(meta.nbytes for meta in source.metadata)
        scope = "partial" if partial else "full"
        sent = {"parameters": len(source.metadata), "bytes": nbytes, "scope": scope}
        print_json({**sent, "servers": [plan.to_json() for plan in plans]})
    else:
        for plan in plans:
            show_plan(Console(), plan, source.metadata, partial=partial)
    return 0 if all(plan.fits for plan in plans) else FAILED


class Push:
    """One push.

    Args:
        options: What the user asked for.
    """

    def __init__(self, options: PushOptions) -> None:
        self._options = options
        self._deadline = Deadline(options.timeout, what="push")
        self._servers = options.servers()
        policy: Policy = "best_effort" if options.policy == "best-effort" else options.policy
        self._client = FanoutClient(self._servers, policy=policy)
        self._engine: TrainerWeightTransferEngine[Any] | None = None

    def run(self) -> int:
        """Push, verify, report; returns the exit status.

        Raises:
            WeightwireError: Nothing was committed, in the words of who failed.
            KeyboardInterrupt: After the update was aborted.
        """
        options = self._options
        source = options.source()
        before = self._infos(options.policy != "all")
        try:
            with TransferProgress(Console(stderr=True), source.metadata) as progress:
                report = self._send(source, progress)
        except KeyboardInterrupt:
            self._part()
            raise KeyboardInterrupt(self._where(before)) from None
        finally:
            self._part()
        outcomes = {outcome.server: outcome for outcome in report.servers}
        committed = [server for server in self._servers if outcomes[server.base_url].committed]
        after = self._infos(True)
        findings, failure = self._verified(committed, source)
        if options.as_json:
            print_json(push_record(report, before, after, findings))
        else:
            show_push(Console(), report, before, after, findings)
        if failure is not None:
            raise failure
        if any((findings or {}).values()):
            return FAILED
        return 0 if len(committed) == len(self._servers) else LEFT_OUT

    def _verified(
        self, servers: list[Server], source: WeightSource
    ) -> tuple[dict[str, list[Finding]] | None, WeightwireError | None]:
        """What differs, if it was asked for; and why it is not known, since what was pushed has to be told anyway."""
        if not self._options.verify:
            return None, None
        try:
            return findings_of(servers, digests_of(source), partial=bool(self._options.only)), None
        except WeightwireError as error:
            return None, error

    def _send(self, source: WeightSource, progress: TransferProgress) -> TransferReport:
        options = self._options

        def send() -> TransferReport:
            if self._engine is None:
                progress.phase("connecting")
                self._engine = self._open(source)
                self._engine.on_progress = progress.event
            remaining = max(0.1, self._deadline.remaining())
            return self._engine.send_weights(weight_version=options.label, pause=options.pause, timeout=remaining)

        return self._client.persist(send)

    def _open(self, source: WeightSource) -> TrainerWeightTransferEngine[Any]:
        options = self._options
        # The transport's own settings stay as they are by default; these every transport has.
        info = engine_class("trainer", options.backend).init_info_cls(
            master_address=options.address or _address_for(self._servers),
            timeout=max(0.1, self._deadline.remaining()),
            takeover=options.takeover,
        )
        return WeightTransferTrainerFactory.trainer_init(info, client=self._client, source=source)

    def _where(self, before: Infos) -> str:
        """What the servers hold after Ctrl-C, which may have come after they committed."""
        after = self._infos(True, _PARTING_SECONDS)
        old = [url for url in before if before[url].get("revision") == after[url].get("revision", "unknown")]
        words = f"interrupted, and the update aborted: {len(old)} of {len(before)} servers are on their old weights"
        others = [f"{url}: {after[url].get('error') or 'has the new ones'}" for url in before if url not in old]
        return "; ".join((words, *others))

    def _infos(self, tolerant: bool, seconds: float = _ANSWER_SECONDS) -> dict[str, Mapping[str, Any]]:
        """What each server says of itself, by URL; of one that does not answer, `error`."""
        answers = ask_all(self._servers, lambda server: server.weight_info(), seconds=seconds)
        if not tolerant:
            demand(answers)
        return {
            server.base_url: {"error": words_of(answer)} if isinstance(answer, WeightwireError) else answer
            for server, answer in zip(self._servers, answers, strict=True)
        }

    def _part(self) -> None:
        """Leave the workers; idempotent. An update that failed, by Ctrl-C too, is aborted already."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def _address_for(servers: list[Server]) -> str:
    """An address of this machine that all servers reach: loopback only if all of them are on it."""
    addresses = [own_address(server.base_url) for server in servers]
    return next((one for one in addresses if not ipaddress.ip_address(one).is_loopback), addresses[0])
