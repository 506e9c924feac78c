"""vLLM's scheduler for engines that capture: the next step is scheduled while one runs, and no drafts are."""

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput


class CaptureScheduler(AsyncScheduler):
    """Schedules no drafts: those of vLLM's capture are the sampled token once more, and verifying them says nothing."""

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for request_id in scheduler_output.num_scheduled_tokens:
            self.requests[request_id].spec_token_ids = []
