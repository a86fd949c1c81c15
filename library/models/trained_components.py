"""The components that a run trains, with which learning rates, and which text encoders stay as they are."""

from dataclasses import replace

from ..config.network_args import get_network_args
from ..config.schema import AdapterConfig, RunConfig
from ..config.schema_objective import NoiseConfig
from ..config.schema_optim import OptimConfig
from ..config.unused_options import explain_own_rates, is_self_tuning_adafactor
from ..diffusion.expert_selection import NoiseExperts
from .detect import DetectedModel, get_config_reader
from .facts import FamilyFacts
from .own_families import get_family_facts


def get_component_lr(component: str, config: OptimConfig, facts: FamilyFacts) -> float:
    """Return the peak learning rate of the denoiser or of a text encoder."""
    if component not in facts.lora.text_encoders:
        return config.learning_rate if config.unet_lr is None else config.unet_lr
    rates = config.text_encoder_lr or (config.learning_rate,)
    return rates[min(tuple(facts.lora.text_encoders).index(component), len(rates) - 1)]


def select_trained_text_encoders(config: AdapterConfig, optim: OptimConfig, facts: FamilyFacts) -> tuple[str, ...]:
    """Select the text encoders that get an adapter; a learning rate of 0 excludes one."""
    if not config.trains_text_encoders:
        return ()
    with_t5 = get_network_args(config).train_t5xxl
    parts = [part for part in facts.lora.text_encoders if with_t5 or part != facts.text.t5_encoder]
    return tuple(part for part in parts if not optim.text_encoder_lr or get_component_lr(part, optim, facts))


def select_extended_text_encoders(config: AdapterConfig, facts: FamilyFacts) -> tuple[str, ...]:
    """Select the text encoders that get trained vectors of a new word (textual inversion)."""
    return tuple(facts.text.embedding_keys) if config.trains_embedding else ()


def get_embedding_lr(config: AdapterConfig, optim: OptimConfig) -> float:
    """Return the peak learning rate of the vectors of a new word."""
    return optim.learning_rate if config.embedding_lr is None else config.embedding_lr


def record_used_rate(config: RunConfig, facts: FamilyFacts) -> RunConfig:
    """Let ``learning_rate``, which metadata name as in sd-scripts, be a rate of a part where every part has its own."""
    adapter, optim = config.adapter, config.optim
    trains_text = bool(select_trained_text_encoders(adapter, optim, facts))
    is_in_schedule = optim.lr_scheduler == "polynomial" or bool(optim.lr_scheduler_type)
    if is_in_schedule or explain_own_rates(config, trains_text_encoders=trains_text) is None:
        return config
    text_lr = optim.text_encoder_lr[0] if trains_text else None
    vectors_lr = adapter.embedding_lr if adapter.trains_embedding else None
    rates = (optim.unet_lr if adapter.trains_denoiser else None, text_lr, vectors_lr)
    used = next((rate for rate in rates if rate is not None), optim.learning_rate)  # block_lr has no one rate
    return replace(config, optim=replace(optim, learning_rate=used))


def caches_only_t5(config: AdapterConfig, optim: OptimConfig, facts: FamilyFacts) -> bool:
    """Whether cached text-encoder outputs are those of T5 alone, because CLIP is trained."""
    trained = select_trained_text_encoders(config, optim, facts)
    return bool(trained) and facts.text.t5_encoder is not None and facts.text.t5_encoder not in trained


def list_cached_text_components(adapter: AdapterConfig, optim: OptimConfig, facts: FamilyFacts) -> tuple[str, ...]:
    """List the text components whose outputs do not change during training: all, or those of T5, or none."""
    if select_extended_text_encoders(adapter, facts):
        return ()
    if not caches_only_t5(adapter, optim, facts):
        return facts.text.components
    encoder = facts.text.t5_encoder or ""
    return encoder, encoder.replace("text_encoder", "tokenizer")


def describe_trained_components(config: AdapterConfig, optim: OptimConfig, facts: FamilyFacts) -> str:
    """Name what is trained, with learning rates: ``training: U-Net (1e-4), text encoder (5e-5)``."""
    names = {} if not config.trains_denoiser else {facts.denoiser_name: _DENOISER_TITLES.get(facts.denoiser_name)}
    for encoder in select_trained_text_encoders(config, optim, facts):
        number = encoder.removeprefix("text_encoder").strip("_") or ("1" if len(facts.lora.text_encoders) > 1 else "")
        names[encoder] = f"text encoder {number}".strip()
    rates = {title or name: get_component_lr(name, optim, facts) for name, title in names.items()}
    if config.trains_embedding:
        rates[_describe_vectors(config)] = get_embedding_lr(config, optim)
    if is_self_tuning_adafactor(optim):
        return f"training: {', '.join(rates)}"
    return f"training: {', '.join(f'{title} (learning rate {rate:g})' for title, rate in rates.items())}"


def _describe_vectors(config: AdapterConfig) -> str:
    count = config.num_vectors_per_token
    return f"{count} vector{'s' if count > 1 else ''} for {config.token_string}"


_DENOISER_TITLES = {"unet": "U-Net", "transformer": "transformer"}


def describe_expert_steps(
    noise: NoiseConfig, seed: int, steps: range, model: DetectedModel, experts: NoiseExperts | None
) -> str:
    """Say how many steps train each expert of a model of two; empty for others."""
    if experts is None:
        return ""
    distribution = get_family_facts(model.family).training_noise.build_distribution(noise, get_config_reader(model))
    return experts.format_steps(seed, steps, distribution)
