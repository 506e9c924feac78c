"""A console logger with short lines: time, stage, message. The event log keeps everything else."""

import logging
import sys

import dagster as dg


class _ShortFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        meta = getattr(record, "dagster_meta", None) or {}
        message = meta.get("orig_message") or record.getMessage()
        step = (meta.get("step_key") or "").rpartition("__")[2]
        where = f" {step}:" if step else ""
        return f"{self.formatTime(record, '%H:%M:%S')}{where} {message}"


@dg.logger(
    config_schema={"log_level": dg.Field(str, default_value="INFO", is_required=False)},
    description="Short lines on standard error.",
)
def short_console(context: dg.InitLoggerContext) -> logging.Logger:
    """The `console` logger of the code location."""
    logger = logging.Logger("eagle3.console", level=context.logger_config["log_level"])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_ShortFormatter())
    logger.addHandler(handler)
    return logger
