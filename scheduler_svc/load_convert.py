"""How busy the cell is, as protobuf: in full for operators, in short for gateways."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.full_queue import FullQueue
from scheduler_svc.load import LoadSnapshot


def load_response(term: int, num_gateways: int, load: LoadSnapshot) -> scheduler_pb2.GetLoadResponse:
    """Return the load in full."""
    return scheduler_pb2.GetLoadResponse(
        term=term,
        num_requests=load.num_requests,
        num_waiting=load.num_waiting,
        num_running=load.num_running,
        num_preemptions=load.num_preemptions,
        num_desyncs=load.num_desyncs,
        num_gateways=num_gateways,
        executors=[
            scheduler_pb2.ExecutorLoad(
                address=executor.address,
                incarnation=executor.incarnation,
                model=executor.model,
                num_running=executor.num_running,
                num_in_flight=executor.num_in_flight,
                num_steps=executor.num_steps,
                total_blocks=executor.total_blocks,
                free_blocks=executor.free_blocks,
                owned_blocks=executor.owned_blocks,
                cached_blocks=executor.cached_blocks,
                pinned_blocks=executor.pinned_blocks,
                reserved_blocks=executor.reserved_blocks,
                num_waiting=executor.num_waiting,
            )
            for executor in load.executors
        ],
    )


def load_report_frame(
    load: LoadSnapshot, num_received_frames: int, full_queues: Mapping[str, FullQueue], *, is_stalled: bool
) -> scheduler_pb2.AttachResponse:
    """Return the load in short, for a gateway of whose stream so many frames have come. `full_queues`: by model."""
    return scheduler_pb2.AttachResponse(
        load_report=scheduler_pb2.LoadReport(
            num_waiting=load.num_waiting,
            num_running=load.num_running,
            kv_usage=load.kv_usage,
            is_stalled=is_stalled,
            num_received_frames=num_received_frames,
            full_queues=[_full_queue(model, queue) for model, queue in full_queues.items()],
        )
    )


def _full_queue(model: str, queue: FullQueue) -> scheduler_pb2.FullQueue:
    choices, tokens = queue.drained or (None, None)
    return scheduler_pb2.FullQueue(
        model=model,
        num_choices=max(0, queue.num_choices),
        num_free_rows=max(0, -queue.num_choices),
        num_tokens=queue.num_tokens,
        max_choices=queue.max_choices,
        max_tokens=queue.max_tokens,
        drained_choices_per_second=choices,
        drained_tokens_per_second=tokens,
        is_idle=queue.is_idle,
    )
