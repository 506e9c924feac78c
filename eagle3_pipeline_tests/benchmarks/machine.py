"""What a measurement ran on."""

import os
import platform


def machine() -> str:
    """Processor and cores."""
    with open("/proc/cpuinfo") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"
