"""Options of the diffusion objective: noise, timesteps, loss, and what the model should not change."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from .option_needs import AnyOf, Has, HasValue, IsSet, IsUnset, LacksValue, Trait
from .options import ALWAYS, Alias, define_option

TimestepSampling = Literal[
    "uniform",
    "sigmoid",
    "shift",
    "flux_shift",
    "flux2_shift",
    "qwen_shift",
    "krea2_shift",
    "ideogram4_shift",
    "nextdit_shift",
    "logsnr",
    "qinglong_flux",
    "qinglong_qwen",
    "sigma",
]

SIGMOID_SAMPLINGS = (
    *("sigmoid", "shift", "flux_shift", "flux2_shift", "qwen_shift", "krea2_shift"),
    *("qinglong_flux", "qinglong_qwen"),
)
"""Values of ``timestep_sampling`` with ``sigmoid_scale``."""

ADDS_NOISE = IsUnset("slider_prompts", "slider_prompts denoises, and adds no noise to images")
_HAS_LOGIT = AnyOf(
    (
        HasValue("timestep_sampling", ("logsnr", "qinglong_flux")),
        HasValue("weighting_scheme", ("logit_normal",)),
    )
)


@dataclass(frozen=True)
class NoiseConfig:
    """Noise, timesteps and prediction target."""

    objective_defaults: Literal["own", "kohya"] = define_option(
        "own",
        "defaults of the options of noise, timesteps and loss, of guidance_scale and system_prompt: this program's "
        "(own), or those of sd-scripts' script for the model, which also ignores some options (kohya); default: kohya "
        "for commands and run files of sd-scripts, own for others",
        needs=ALWAYS,
        default_text="kohya for commands and run files of sd-scripts, own for others",
        metadata_key="ss_objective_defaults",
        written_at_default="always",
    )
    v_parameterization: bool | None = define_option(
        None,
        "diffusion models: v-prediction instead of noise prediction; default: as the model's scheduler config says",
        needs=(Has(Trait.DIFFUSION),),
        kohya_default="false",
        default_text="true, as the model says",
    )
    zero_terminal_snr: bool = define_option(
        False,
        "v-prediction: rescale the noise schedule to zero terminal SNR, so that the last timestep is pure noise",
        needs=(Has(Trait.DIFFUSION),),
        metadata_key="ss_zero_terminal_snr",
    )
    model_prediction_type: Literal["raw", "x0", "additive", "sigma_scaled"] = define_option(
        "raw",
        "flow matching: what the loss compares: the prediction with noise minus image (raw), estimated with true clean "
        "latents (x0, SD3 of sd-scripts), or prediction plus noisy latents (additive) or estimated clean latents "
        "(sigma_scaled) with noise minus image, as sd-scripts does",
        needs=(Has(Trait.FLOW),),
        written_at_default="kohya",
    )
    min_timestep: int | None = define_option(
        None, "minimum timestep, of 1000; default: 0", minimum=0, maximum=999, needs=(ADDS_NOISE,)
    )
    max_timestep: int | None = define_option(
        None, "maximum timestep (exclusive), of 1000; default: 1000", minimum=1, maximum=1000, needs=(ADDS_NOISE,)
    )
    preserve_distribution_shape: bool = define_option(
        False,
        "min_timestep, max_timestep: cut the distribution of timesteps off there instead of scaling it into the range",
        needs=(
            Has(Trait.FLOW),
            AnyOf((IsSet("min_timestep"), IsSet("max_timestep"))),
            LacksValue("timestep_sampling", ("sigma",)),
            ADDS_NOISE,
        ),
    )
    num_timestep_buckets: int | None = define_option(
        None,
        "stratified timesteps: of each so many samples in a row, one is in each of as many equally likely parts of the "
        "distribution; for small datasets",
        minimum=1,
        needs=(ADDS_NOISE,),
        is_unset_by_zero=True,
    )
    timestep_sampling: TimestepSampling | None = define_option(
        None,
        "flow matching: distribution of timesteps (docs/models.md); default: by the model's family, or sigma with a "
        "weighting_scheme, shift with a discrete_flow_shift",
        needs=(AnyOf((HasValue("timestep_sampling", ("uniform",)), Has(Trait.FLOW))), ADDS_NOISE),
        default_text="that of the model's family",
        musubi_default="sigma",
    )
    sigmoid_scale: float = define_option(
        1.0,
        "timestep_sampling sigmoid, shift, flux_shift ...: scale; smaller concentrates on middle timesteps",
        minimum=0,
        needs=(Has(Trait.FLOW), HasValue("timestep_sampling", SIGMOID_SAMPLINGS), ADDS_NOISE),
        metadata_key="ss_sigmoid_scale",
    )
    discrete_flow_shift: float | None = define_option(
        None,
        "timestep_sampling shift, sigma: shift towards noise; default: that of the model's family",
        needs=(Has(Trait.FLOW), HasValue("timestep_sampling", ("shift", "sigma")), ADDS_NOISE),
        aliases=(Alias("training_shift"),),
        default_text="that of the model's family",
        musubi_default=1.0,
        metadata_key="ss_discrete_flow_shift",
    )
    weighting_scheme: Literal["none", "uniform", "sigma_sqrt", "cosmap", "logit_normal", "mode"] | None = define_option(
        None,
        "flow matching: loss weighting (sigma_sqrt, cosmap) or timestep distribution (logit_normal, mode)",
        needs=(
            AnyOf((HasValue("weighting_scheme", ("none", "uniform")), Has(Trait.FLOW))),
            AnyOf(
                (
                    LacksValue("weighting_scheme", ("logit_normal", "mode")),
                    HasValue("timestep_sampling", ("sigma",), "timestep_sampling samples the timesteps"),
                )
            ),
        ),
    )
    logit_mean: float = define_option(
        0.0,
        "weighting_scheme logit_normal: mean; above 0 means more noise; timestep_sampling logsnr, qinglong_flux: mean "
        "of the log-SNR; above 0 means less noise",
        needs=(Has(Trait.FLOW), _HAS_LOGIT, ADDS_NOISE),
        metadata_key="ss_logit_mean",
    )
    logit_std: float = define_option(
        1.0,
        "weighting_scheme logit_normal, timestep_sampling logsnr, qinglong_flux: standard deviation; smaller "
        "concentrates on the mean",
        minimum=0,
        needs=(Has(Trait.FLOW), _HAS_LOGIT, ADDS_NOISE),
        metadata_key="ss_logit_std",
    )
    mode_scale: float = define_option(
        1.29,
        "weighting_scheme mode: scale; above 0 concentrates on middle timesteps",
        minimum=-1,
        maximum=1.75,
        needs=(Has(Trait.FLOW), HasValue("weighting_scheme", ("mode",)), ADDS_NOISE),
        metadata_key="ss_mode_scale",
    )
    noise_offset: float = define_option(
        0.0,
        "diffusion models: noise offset per channel, to learn dark and bright images; 0.05 to 0.1 is usual",
        minimum=0,
        needs=(Has(Trait.DIFFUSION),),
        metadata_key="ss_noise_offset",
        is_dropped_at_zero=True,
    )
    noise_offset_random_strength: bool = define_option(
        False,
        "sample noise_offset uniformly between 0 and its value for each image",
        needs=(Has(Trait.DIFFUSION), IsSet("noise_offset")),
        metadata_key="ss_noise_offset_random_strength",
    )
    adaptive_noise_scale: float | None = define_option(
        None,
        "add the mean of the latents times this to noise_offset; the sum is at least 0",
        needs=(Has(Trait.DIFFUSION), IsSet("noise_offset")),
        metadata_key="ss_adaptive_noise_scale",
    )
    multires_noise_iterations: int = define_option(
        0,
        "diffusion models: number of coarser noise levels to add (pyramid noise); 6 to 10 is usual",
        minimum=0,
        needs=(Has(Trait.DIFFUSION),),
        metadata_key="ss_multires_noise_iterations",
        is_dropped_at_zero=True,
    )
    multires_noise_discount: float = define_option(
        0.3,
        "multires_noise_iterations: factor of each coarser noise level to the one before",
        minimum=0,
        needs=(Has(Trait.DIFFUSION), IsSet("multires_noise_iterations")),
        metadata_key="ss_multires_noise_discount",
    )
    ip_noise_gamma: float = define_option(
        0.0,
        "input perturbation noise: noise added to the model's input but not to its target; 0.1 is usual",
        minimum=0,
        needs=(ADDS_NOISE,),
        metadata_key="ss_ip_noise_gamma",
        is_dropped_at_zero=True,
    )
    ip_noise_gamma_random_strength: bool = define_option(
        False,
        "sample ip_noise_gamma uniformly between 0 and its value for each image",
        needs=(IsSet("ip_noise_gamma"), ADDS_NOISE),
        metadata_key="ss_ip_noise_gamma_random_strength",
    )

    def get_timestep_sampling(self, family_default: TimestepSampling = "shift") -> TimestepSampling:
        """Return the distribution of timesteps of a flow-matching model, of a family with this default.

        A shift that is set is not dropped because the family's default has one of its own.
        """
        implied: TimestepSampling = "sigma" if self.weighting_scheme else family_default
        if self.discrete_flow_shift is not None and implied not in ("shift", "sigma"):
            implied = "shift"
        return self.timestep_sampling or implied


@dataclass(frozen=True)
class LossConfig:
    """Loss function and loss weighting."""

    loss_type: Literal["l2", "l1", "huber", "smooth_l1"] = define_option(
        "l2",
        "loss function; huber and smooth_l1 are less sensitive to outliers than l2",
        needs=ALWAYS,
        metadata_key="ss_loss_type",
    )
    huber_schedule: Literal["constant", "exponential", "snr"] = define_option(
        "snr",
        "huber, smooth_l1: threshold by timestep: huber_c (constant), or from 1 at low noise to huber_c at high noise "
        "(exponential, snr)",
        needs=(HasValue("loss_type", ("huber", "smooth_l1")),),
        metadata_key="ss_huber_schedule",
    )
    huber_c: float = define_option(
        0.1,
        "huber, smooth_l1: threshold above which a difference counts linearly",
        needs=(HasValue("loss_type", ("huber", "smooth_l1")),),
        metadata_key="ss_huber_c",
    )
    huber_scale: float = define_option(
        1.0,
        "huber, smooth_l1: factor of the threshold at all timesteps",
        needs=(HasValue("loss_type", ("huber", "smooth_l1")),),
        metadata_key="ss_huber_scale",
    )
    audio_loss_weight: float = define_option(
        1.0,
        "weight of the loss of sound beside that of frames (train_audio), each the mean over its latents",
        minimum=0,
        needs=(IsSet("train_audio"),),
    )
    min_snr_gamma: float | None = define_option(
        None,
        "diffusion models: gamma of min-SNR weighting, which reduces the loss at low noise; 5 is usual",
        minimum=0,
        needs=(Has(Trait.DIFFUSION),),
        metadata_key="ss_min_snr_gamma",
    )
    debiased_estimation_loss: bool = define_option(
        False,
        "diffusion models: debiased estimation loss, which raises the loss weight at high noise",
        needs=(Has(Trait.DIFFUSION),),
        metadata_key="ss_debiased_estimation",
    )
    scale_v_pred_loss_like_noise_pred: bool = define_option(
        False,
        "v-prediction: weight timesteps as noise prediction does",
        needs=(Has(Trait.DIFFUSION), Has(Trait.V_PREDICTION)),
    )
    v_pred_like_loss: float | None = define_option(
        None,
        "noise prediction: add a v-prediction-like loss with this weight",
        minimum=0,
        needs=(Has(Trait.DIFFUSION), Has(Trait.NOISE_PREDICTION)),
    )


@dataclass(frozen=True)
class PreservationConfig:
    """Output preservation: texts for which the model should predict what it predicts without the LoRA."""

    diff_output_preservation_class: str | None = define_option(
        None,
        "differential output preservation: with this word instead of the trigger in its captions, the model should "
        "predict what it predicts without the LoRA, such as person; see docs/adapters.md",
        needs=ALWAYS,
    )
    diff_output_preservation_trigger: str | None = define_option(
        None,
        "the word or words in captions that diff_output_preservation_class replaces",
        needs=(IsSet("diff_output_preservation_class"),),
    )
    diff_output_preservation_multiplier: float = define_option(
        1.0,
        "weight of the loss of diff_output_preservation_class; 0 switches it off",
        minimum=0,
        needs=(IsSet("diff_output_preservation_class"),),
    )
    blank_prompt_preservation_multiplier: float = define_option(
        0.0,
        "weight of a loss that keeps what the model predicts without a caption as it is without the LoRA; 1 is usual",
        minimum=0,
        needs=ALWAYS,
    )

    @property
    def is_differential(self) -> bool:
        return bool(self.diff_output_preservation_class and self.diff_output_preservation_multiplier)

    @property
    def active_option(self) -> str | None:
        """The option that asks for preservation; None without."""
        if self.is_differential:
            return "diff_output_preservation_class"
        return "blank_prompt_preservation_multiplier" if self.blank_prompt_preservation_multiplier else None

    def list_rewrites(self) -> Sequence[tuple[float, Callable[[str], str | None]]]:
        """List the weight of each kind of preservation, and the text for a caption; None where it has none."""
        rewrites: list[tuple[float, Callable[[str], str | None]]] = []
        if self.is_differential:
            rewrites.append((self.diff_output_preservation_multiplier, self.replace_trigger))
        if self.blank_prompt_preservation_multiplier:
            rewrites.append((self.blank_prompt_preservation_multiplier, lambda _: ""))
        return rewrites

    def list_preserved_texts(self, caption: str) -> list[str]:
        """List the texts for which the output is preserved beside a caption, which is one of them where it stays."""
        texts = (rewrite(caption) for _, rewrite in self.list_rewrites())
        return [caption if text is None else text for text in texts]

    def replace_trigger(self, caption: str) -> str | None:
        """Replace the trigger, as whole words in any case, by the class; None where the caption has none."""
        trigger, word = self.diff_output_preservation_trigger or "", self.diff_output_preservation_class or ""
        text, count = re.subn(rf"(?<!\w){re.escape(trigger)}(?!\w)", lambda _: word, caption, flags=re.IGNORECASE)
        return text if count else None


@dataclass(frozen=True)
class SliderConfig:
    """Training on texts alone (slider_prompts): how the latents are made on which predictions are compared."""

    max_denoising_steps: int = define_option(
        40,
        "slider_prompts: steps of a whole denoising; each training step takes a random part of them, with the LoRA",
        minimum=2,
        maximum=1000,
        needs=(IsSet("slider_prompts"),),
    )
    denoise_guidance_scale: float | None = define_option(
        None,
        "slider_prompts: guidance of this denoising, classifier-free or by the model's guidance embedding; default: 3, "
        "and 1 for models that are distilled to few steps",
        minimum=0,
        needs=(IsSet("slider_prompts"),),
        aliases=(Alias("leco_denoise_guidance_scale"),),
        default_text="3; 1 for models that are distilled to few steps",
    )
