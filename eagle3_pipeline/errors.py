"""The exception tree: every message says what failed, where, what was expected and found, and what to do."""

from pathlib import Path

_CAUSE_CHARS = 300


class Eagle3Error(Exception):
    """Base of all errors a user can meet; its text is complete without a traceback."""


class ConfigError(Eagle3Error):
    """A pipeline file, an environment variable or a combination of settings is wrong."""


class TemplateRefusedError(ConfigError):
    """The verifier has no chat template, or it refuses a conversation."""


class DataError(Eagle3Error):
    """Source data cannot be read, or too little of it is usable."""


class StoreError(Eagle3Error):
    """The artifact store cannot be read or written."""


class CorruptArtifactError(StoreError):
    """An artifact's bytes do not match its manifest; it was moved to quarantine."""


class WriterBusyError(StoreError):
    """Another process is writing the same artifact."""


class DiskSpaceError(StoreError):
    """The volume lacks the bytes that a stage needs."""


class EngineError(Eagle3Error):
    """The verifier engine failed to start, died, or refused a request."""


class EngineDiedError(EngineError):
    """The engine's process ended while it worked."""


class EngineSilentError(EngineError):
    """The engine's process lives and does not answer."""


class EngineStoppedError(EngineError):
    """Somebody stopped the engine while it worked or loaded."""


class EngineRefusedError(EngineError):
    """An engine that failed before is not started again until it is reset.

    Attributes:
        folder: the engine's.
    """

    def __init__(self, message: str, folder: Path) -> None:
        super().__init__(message)
        self.folder = folder


class PreflightError(EngineError):
    """A check found what would fail after the load."""


class LeaseError(EngineError):
    """No GPU (or CPU slot) became free in time."""


class CaptureError(EngineError):
    """Hidden states are missing, incomplete or wrong."""


class DecodingError(CaptureError):
    """What an engine answered is not what it computes from the same tokens."""


class TrainingError(Eagle3Error):
    """Training cannot start or gave an unusable draft."""


class EvaluationError(Eagle3Error):
    """The draft cannot be served, or its evaluation contradicts itself."""


class StaleInputError(Eagle3Error):
    """A stage was asked for before what it depends on was materialised."""


def with_causes(error: BaseException) -> str:
    """An error's text, and that of each error that caused it, in short, where it does not hold it already.

    Libraries wrap what happened in errors of their own, which say only that something did.
    """
    told = str(error) or type(error).__name__
    seen = {id(error)}
    while (cause := _cause(error)) is not None and id(cause) not in seen:
        seen.add(id(cause))
        error = cause
        text = " ".join(str(cause).split())
        if len(text) > _CAUSE_CHARS:
            text = f"{text[: _CAUSE_CHARS // 2]} ... {text[-_CAUSE_CHARS // 2 :]}"
        if not text or text not in " ".join(told.split()):
            told += f"; caused by {type(cause).__name__}" + (f": {text}" if text else "")
    return told


def _cause(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)
