"""The config class that ships with the tiny Kimi, as the real one ships its own: only remote code reads it."""

from typing import Any

from transformers import PretrainedConfig


class TinyKimiTextConfig(PretrainedConfig):
    """Keeps every key of `text_config` as it stands."""

    model_type = "deepseek_v3"

    def __init__(
        self,
        max_position_embeddings: int = 4096,
        rope_theta: float = 10000.0,
        rope_scaling: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        # Transformers reads these while it sets the other keys.
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta = rope_theta
        self.rope_scaling = rope_scaling
        super().__init__(**kwargs)


class TinyKimiConfig(PretrainedConfig):
    """A language model and a vision tower."""

    model_type = "kimi_k25"

    def __init__(self, text_config: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.text_config = TinyKimiTextConfig(**(text_config or {}))
        super().__init__(**kwargs)
