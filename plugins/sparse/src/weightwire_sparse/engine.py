"""The worker's side: receives changes, checks all of them, and holds them back until every rank agrees to commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from weightwire.checksums import Checksums
from weightwire.chunk_transfer import ChunkReceiver
from weightwire.collective import TorchCommunicator
from weightwire.deadline import Deadline
from weightwire.engine import WeightTransferEngine
from weightwire.errors import PlanOutdated, UpdateRefused
from weightwire.fleet import Fleet
from weightwire.layout import ParamMeta
from weightwire.load_plan import LoadPlan
from weightwire.packing import BufferRing, plan_digest
from weightwire.sink import Patch, UpdateSpec
from weightwire_sparse import compression, payload
from weightwire_sparse.delta import Announcement, gains
from weightwire_sparse.dense import DenseLanding, DensePlan, dense_plan
from weightwire_sparse.incoming import Memory, patches_of
from weightwire_sparse.messages import SparseNCCLWeightTransferInitInfo, SparseNCCLWeightTransferUpdateInfo
from weightwire_sparse.patches import space_of
from weightwire_sparse.pieces import AddressSpace, spaces_of
from weightwire_sparse.results import ResultDigests, distinct_plans


class SparseNCCLWeightTransferEngine(
    WeightTransferEngine[SparseNCCLWeightTransferInitInfo, SparseNCCLWeightTransferUpdateInfo]
):
    """Receives what changed, from one or more trainer ranks."""

    init_info_cls = SparseNCCLWeightTransferInitInfo
    update_info_cls = SparseNCCLWeightTransferUpdateInfo
    supports_draft_weight_update = False
    needs_load_plans = True
    stock_needs = "NCCL"

    _communicator: TorchCommunicator | None = None
    _ring: BufferRing | None = None
    _init_info: SparseNCCLWeightTransferInitInfo | None = None
    _dense: DensePlan | None = None
    _refusal: UpdateRefused | None = None
    _received = 0
    _chunks: list[tuple[tuple[ParamMeta, ...], list[Patch]]]
    _memory: Memory

    def plan_digest(self, init_info: SparseNCCLWeightTransferInitInfo) -> str:
        """Digest of the chunks of a dense round.

        Raises:
            MessageError: Values will come compressed, and what decompresses them is not installed here.
        """
        link = self._require_link()
        compression.check(str(link.info.options["compression"]))
        self._spaces: dict[int, AddressSpace] = spaces_of(link.metadata, link.info.trainers)
        self._dense = dense_plan(self._spaces, init_info.packed_buffer_size_bytes)
        return plan_digest(self._dense.chunks)

    def connect(self, init_info: SparseNCCLWeightTransferInitInfo, deadline: Deadline) -> None:
        """Join the group of senders and workers."""
        link = self._require_link()
        info = link.info
        self._kernels = payload.choose("auto")
        payload.warm(self._kernels)
        if self._kernels == "numba":
            from weightwire_sparse import exchange_numba

            exchange_numba.install()
        fleet = Fleet(info.trainers, tuple(info.senders), info.workers)
        self._communicator = TorchCommunicator(
            link.rendezvous.store(f"sparse-{info.epoch}", deadline),
            rank=fleet.rank_offset + link.worker,
            world_size=init_info.world_size,
            labels=fleet.labels(),
            device=self.device,
            deadline=deadline,
            hostname=link.rendezvous.local_address,
            stall_limit=float(info.options["stall_limit"]),
            piece_bytes=init_info.packed_buffer_size_bytes,
            window=init_info.packed_num_buffers,
            senders=range(len(fleet.senders)),
        )
        self._ring = BufferRing(init_info.packed_num_buffers, init_info.packed_buffer_size_bytes, device=self.device)
        self._memory = Memory(self.device)
        self._init_info = init_info

    # A round

    def start_weight_update(self) -> None:
        """See `WeightTransferEngine.start_weight_update`."""
        super().start_weight_update()
        self._refusal, self._received, self._chunks = None, 0, []

    def update_metadata(self, update_info: SparseNCCLWeightTransferUpdateInfo) -> tuple[ParamMeta, ...]:
        """What a caller's patches are of, or what the trainer's source declares."""
        patched = update_info.patched
        return super().update_metadata(update_info) if patched is None else patched

    def check_update(self, spec: UpdateSpec) -> None:
        """See `WeightTransferEngine.check_update`.

        Raises:
            UpdateRefused: A caller's patches, and this model cannot be patched.
            PlanOutdated: The model loads otherwise than when the link was opened.
        """
        link = self._require_link()
        if spec.metadata is link.metadata:
            own, planned = self.sink.load_plan(link.metadata), self.load_plans[link.worker]
            if own is not planned and own.digest() != planned.digest():
                raise PlanOutdated("this worker's model is laid out otherwise than when the link was opened")
        else:
            why = self.sink.unpatchable(spec.metadata)
            if why is not None:
                raise UpdateRefused(f"this worker's model cannot be patched: {why}", transport=self.backend)

    def standing(self, spec: UpdateSpec) -> dict[str, Any]:
        """Whether the weights here can be patched, and why not."""
        return {"unpatchable": self.sink.unpatchable(spec.metadata)}

    def update_bytes(self, spec: UpdateSpec) -> int:
        """What came to this rank."""
        return self._received

    def receive_weights(self, update_info: SparseNCCLWeightTransferUpdateInfo) -> None:
        """Receive the changes of the round, or every piece whole.

        What is wrong with changes is told in the vote, so that the link stays.

        Raises:
            TransferError: Not initialised.
            PeerLost: A sender died or stopped.
        """
        if self._communicator is None:
            raise self.not_initialised()
        link = self._require_link()
        metadata = self.update_metadata(update_info)
        spaces = self._spaces if update_info.patched is None else {0: space_of(metadata)}
        alone = update_info.round is None
        phase = f"patches-{update_info.chunk}" if alone else f"delta-{update_info.round}"
        said = link.gather(phase, self.deadline)
        announced = {rank: Announcement.from_json(said[rank], space) for rank, space in spaces.items()}
        most = 1.0 if update_info.patched is not None else float(link.info.options["dense_above"])
        if update_info.patched is not None or gains(announced, spaces, most):
            # Several messages wait for the end of the update side by side.
            memory = Memory(self.device) if alone else self._memory
            came = self._receive(announced, spaces, memory)
            if alone:
                self._chunks.append((metadata, self._decoded(came, spaces, announced, metadata, memory)))
                return
            try:
                self._hold(metadata, self._decoded(came, spaces, announced, metadata, memory))
            except UpdateRefused as refusal:
                self._refusal = refusal
            if update_info.verify:
                self._compare_patched(update_info.round)
        else:
            self._receive_dense(update_info)

    def drain_pending(self) -> None:
        """Hand the sink what came in several messages: it has to hear of all parameters before it takes any.

        Raises:
            UpdateRefused: The model does not take them.
        """
        chunks, self._chunks = self._chunks, []
        if not chunks:
            return
        metas = {meta.name: meta for metadata, _ in chunks for meta in metadata}
        self.sink.abort()
        self.sink.begin(UpdateSpec(tuple(metas.values()), scope="partial"))
        for _, patches in chunks:
            self.sink.patch(patches)
        touched = {patch.name for _, patches in chunks for patch in patches}
        self.sink.keep([name for name in metas if name not in touched])

    def finish_weight_update(self) -> None:
        """See `WeightTransferEngine.finish_weight_update`.

        Raises:
            UpdateRefused: The changes that came are malformed, or would not give the trainer's weights.
        """
        if self.driven and self._refusal is not None:
            raise self._refusal
        super().finish_weight_update()

    def _receive(
        self, announced: Mapping[int, Announcement], spaces: Mapping[int, AddressSpace], memory: Memory
    ) -> dict[int, list[Tensor]]:
        """What every sender sends: its payload, then the pieces that travel whole; bytes in host memory."""
        assert self._communicator is not None
        link = self._require_link()
        self._communicator.begin_round()
        came, handles = {}, []
        for rank, one in announced.items():
            sizes = [one.packed or 0, *(spaces[rank].pieces[number].nbytes for number in one.whole)]
            came[rank] = memory.of(rank, sizes)
            source = link.info.senders.index(rank)
            handles.append(self._communicator.receive(came[rank], source, deadline=self.deadline))
            self._received += sum(sizes)
        for handle in handles:
            handle.wait(self.deadline)
        return {rank: [buffer.cpu() for buffer in buffers] for rank, buffers in came.items()}

    def _decoded(
        self,
        came: Mapping[int, list[Tensor]],
        spaces: Mapping[int, AddressSpace],
        announced: Mapping[int, Announcement],
        metadata: tuple[ParamMeta, ...],
        memory: Memory,
    ) -> list[Patch]:
        """What came, as patches whose values lie where they were received.

        Raises:
            UpdateRefused: A payload is malformed.
        """
        patches = []
        for rank, (packed, *whole) in came.items():
            space = spaces[rank]
            room = partial(memory.addresses_of, rank)
            changes = payload.read(packed.numpy(), space, kernels=self._kernels, threads=2, room=room)
            patches += patches_of(changes, dict(zip(announced[rank].whole, whole, strict=True)), space, metadata)
        return patches

    def _hold(self, metadata: tuple[ParamMeta, ...], patches: Sequence[Patch]) -> None:
        """Hand patches to the sink, which holds them back; what is not patched stays."""
        self.sink.patch(patches)
        touched = {patch.name for patch in patches}
        self.sink.keep([meta.name for meta in metadata if meta.name not in touched])

    def _receive_dense(self, update_info: SparseNCCLWeightTransferUpdateInfo) -> None:
        assert self._communicator is not None and self._ring is not None
        assert self._dense is not None and self._init_info is not None
        link, own = self._require_link(), self.sink.load_plan(self._require_link().metadata)
        landing = DenseLanding(self._dense, link.metadata, own, self.sink.landing(own), self.device)
        info = self._init_info
        ChunkReceiver(
            self._dense.chunks,
            self._dense.metadata,
            self._communicator,
            self._ring,
            senders={rank: place for place, rank in enumerate(link.info.senders)},
            targets=landing.targets,
            received=lambda names: None,
            load=landing.load,
            loose_bytes=info.packed_num_buffers * info.packed_buffer_size_bytes,
            deadline=self.deadline,
            device=self.device,
            checksums=Checksums(enabled=False),
        ).run()
        self._received += sum(meta.nbytes for meta in self._dense.metadata)
        if update_info.verify:
            self._compare(update_info.round, own, landing.memory.items())
        del landing
        self.sink.landed(own)

    def _compare_patched(self, number: int | None) -> None:
        own, results = self.sink.load_plan(self._require_link().metadata), None
        try:
            results = self.sink.outcome(own) if self._refusal is None else None
        except UpdateRefused as refusal:
            self._refusal = refusal
        self._compare(number, own, () if results is None else results)

    def _compare(self, number: int | None, own: LoadPlan, results: Any) -> None:
        """Compare the digests of what would result with every sender's; a difference is told in the vote."""
        link, plans = self._require_link(), distinct_plans(self.load_plans)
        digests = {rank: ResultDigests(own, link.metadata) for rank in self._spaces}
        pieces = {rank: {piece.place: piece for piece in space.pieces} for rank, space in self._spaces.items()}
        for target, flat in results:
            for rank, digest in digests.items():
                digest.of_target(target, flat, pieces[rank])
            self.deadline.check()
        said = link.gather(f"result-{number}", self.deadline)
        place = [plan.digest() for plan in plans].index(own.digest())
        try:
            if self._refusal is None:
                for rank, digest in digests.items():
                    digest.compare(said[rank][place], rank=link.rendezvous.label(rank))
        except UpdateRefused as refusal:
            self._refusal = refusal

    def report_details(self) -> dict[str, Any]:
        """Which kernels decoded."""
        return {"kernels": self._kernels}

    def disconnect(self, *, error: BaseException | None = None) -> None:
        """Leave the group; one that failed is parked until its threads have ended."""
        communicator, self._communicator = self._communicator, None
        ring, self._ring = self._ring, None
        if communicator is not None:
            communicator.leave([ring, self.sink, self._memory], error=error)
