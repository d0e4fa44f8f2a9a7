"""What an engine raises that is nobody's mistake. Host only, no jax."""


class EngineFull(ValueError):
    """The engine has as many requests as it admits; try again when some are done."""


class StepFailed(RuntimeError):
    """A step raised; the cause is chained.

    No request is lost by it: all are queued again and the next step goes on with them. A request
    that is to blame can be aborted.

    Attributes:
      step: number of the step.
      request_ids: requests that were computed in it.
    """

    def __init__(self, step: int, request_ids: tuple[str, ...], error: Exception) -> None:
        super().__init__(
            f"step {step} failed with {type(error).__name__}: {error}; its requests are queued "
            f"again: {', '.join(request_ids)}"
        )
        self.step = step
        self.request_ids = request_ids
