"""The layers that other trainers adapt by default, as patterns of module names, for ``adapter_target_table``.

Each rule is what a trainer does if its user sets no layers: classes of blocks and patterns that it has, or the names
that it gives to peft.  They are in networks/ of sd-scripts and musubi-tuner, toolkit/lora_special.py (with
``transformer_only``) and ``get_transformer_block_names`` of ai-toolkit, and ``DEFAULT_LORA_TARGET`` of SimpleTuner, as
of the summer of 2026.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PROGRAMS = ("sd-scripts", "musubi-tuner", "ai-toolkit", "SimpleTuner")


@dataclass(frozen=True)
class TargetRule:
    """Which layers a trainer adapts by default."""

    include: str
    """The pattern that the whole name of a layer has to match."""
    exclude: str = ""
    """The pattern of names that are left out; none by default."""
    is_of_original_names: bool = False
    """Whether the names are those of the original model, and not of diffusers."""

    def match(self, diffusers_name: str, original_name: str) -> bool:
        """Whether the trainer adapts this layer."""
        name = original_name if self.is_of_original_names else diffusers_name
        excluded = self.exclude and re.fullmatch(self.exclude, name)
        return bool(re.fullmatch(self.include, name)) and not excluded


def _match_original(include: str, exclude: str = "") -> TargetRule:
    return TargetRule(include, exclude, is_of_original_names=True)


def _match_suffixes(*suffixes: str) -> TargetRule:
    """peft's rule for a list of names: the last parts of a module's name."""
    return TargetRule(rf"(.*\.)?({'|'.join(map(re.escape, suffixes))})")


def _match_part(part: str, exclude: str = "") -> TargetRule:
    return TargetRule(rf".*({part}).*", exclude)


_EVERY_LAYER = TargetRule(".*")
_STREAM_BLOCKS = r"(double|single)_blocks\..*"
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
_JOINT_ATTENTION = (*_ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def _assign(rule: TargetRule, *families: str) -> dict[str, TargetRule]:
    return dict.fromkeys(families, rule)


QWEN_FAMILIES = ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus")
KANDINSKY5_FAMILIES = ("kandinsky5_image", "kandinsky5_video", "kandinsky5_i2v")
WAN_FAMILIES = ("wan", "wan_i2v", "wan_flf2v", "wan22_t2v", "wan22_i2v")

RULES: Mapping[str, Mapping[str, TargetRule]] = {
    "sd-scripts": {
        **_assign(TargetRule(r".*\.attentions\.\d+\..*"), "sd1", "sd2", "sdxl"),
        **_assign(_match_original(r"joint_blocks\..*"), "sd3"),
        **_assign(_match_original(_STREAM_BLOCKS), "flux", "chroma", "hunyuan_image"),
        **_assign(_match_original(r"(layers|noise_refiner|context_refiner|final_layer)\..*"), "lumina2"),
        "anima": _match_original(
            r"(blocks|x_embedder|t_embedder|final_layer)\..*", r".*(_modulation|_norm|_embedder|final_layer).*"
        ),
    },
    "musubi-tuner": {
        **_assign(
            _match_original(_STREAM_BLOCKS, r".*(img_mod\.lin|txt_mod\.lin|modulation\.lin|norm).*"),
            *("flux_kontext", "flux2_dev", "flux2_klein"),
        ),
        "z_image": _match_original(r"(layers|noise_refiner|context_refiner)\..*", r".*(_modulation|_refiner).*"),
        **_assign(TargetRule(r"transformer_blocks\..*", r".*(_mod_).*"), *QWEN_FAMILIES, "qwen_image_layered"),
        "krea2": _EVERY_LAYER,
        "ideogram4": _match_original(r"layers\..*", r".*adaln_modulation.*"),
        **_assign(
            _match_original(
                r"blocks\..*", r".*(patch_embedding|text_embedding|time_embedding|time_projection|norm|head).*"
            ),
            *WAN_FAMILIES,
        ),
        "hunyuan_video": _match_original(_STREAM_BLOCKS, r".*(img_mod|txt_mod|modulation).*"),
        "framepack": TargetRule(r"(single_)?transformer_blocks\..*", r".*(norm).*"),
        **_assign(_match_original(r"double_blocks\..*", r".*(_in).*"), "hunyuan_video15", "hunyuan_video15_i2v"),
        **_assign(
            TargetRule(r"(text|visual)_transformer_blocks\..*", r".*modulation.*"),
            *KANDINSKY5_FAMILIES,
        ),
    },
    "ai-toolkit": {
        **_assign(_EVERY_LAYER, "sd1", "sd2", "sdxl", "aura_flow"),
        **_assign(
            _match_part("transformer_blocks"),
            *("sd3", "flux", "flux_kontext", "pixart_sigma", "cogview4", "anima", *QWEN_FAMILIES),
        ),
        **_assign(_match_original(r".*(double|single)_blocks.*"), "chroma", "flux2_dev", "flux2_klein"),
        **_assign(_match_part("layers"), "z_image", "ernie_image"),
        "lumina2": _match_part(r"(^|\.)(layers|noise_refiner|context_refiner)\."),
        "krea2": _match_original(r".*blocks.*"),
        "ideogram4": _match_original(r".*layers.*"),
        "prx_pixel": _match_part("blocks"),
        "ltx2": _match_part("transformer_blocks"),
        "minimax_h3": _match_part("blocks", r".*adaln_proj.*"),
        "nucleus_image": _match_part("transformer_blocks", r".*img_mlp\.(experts|gate).*"),
        "hidream": _match_part("double_stream_blocks|single_stream_blocks", r".*ff_i\.(experts|gate).*"),
        **_assign(_match_part("blocks"), "wan", "wan_i2v", "wan22_t2v", "wan22_i2v", "wan22_ti2v"),
    },
    "SimpleTuner": {
        **_assign(
            _match_suffixes(*_ATTENTION),
            *("sd1", "sd2", "sdxl", "kolors", "sd3", "z_image", *QWEN_FAMILIES, "longcat_image", "longcat_image_edit"),
            *("ernie_image", "lumina2", "krea2", "sana", "hidream", "pixart_sigma", "anima", "sana_video"),
            *("wan", "wan_i2v", "wan_flf2v", "wan22_ti2v", "ltx_video095", "minimax_h3"),
        ),
        **_assign(
            _match_suffixes(*_JOINT_ATTENTION),
            *("flux", "flux_kontext", "chroma", "aura_flow", "hunyuan_video15", "hunyuan_video15_i2v"),
        ),
        **_assign(
            _match_suffixes(*(f"attn.{layer}" for layer in (*_ATTENTION, "to_qkv_mlp_proj"))),
            *("flux2_dev", "flux2_klein"),
        ),
        **_assign(_match_suffixes("to_query", "to_key", "to_value"), *KANDINSKY5_FAMILIES),
    },
}

REASONS: Mapping[str, str] = {
    **dict.fromkeys(
        (*QWEN_FAMILIES, "qwen_image_layered"),
        "without the modulation, as musubi-tuner means it: its pattern `_mod_` matches no name; "
        "`train_modulation=True` trains it",
    ),
    "krea2": "as musubi-tuner, without the 12 weights of the layer that mixes the text encoder's layers",
    "kolors": "as Stable Diffusion XL in sd-scripts, whose UNet it has",
    "cogview4": "as in CogKit, the trainer of its authors",
    "hidream": "image and text alike; an expert would get a gradient only from the tokens that choose it",
    "prx_pixel": "without the modulation, as PRX",
    "nucleus_image": "attention and feed-forward layers, without the modulation and the projections of the text",
    "ltx_video095": "as in diffusion-pipe",
    "ltx2": "without the stream of sound, which pictures alone do not train",
    "minimax_h3": "without the two blocks that refine the text, whose layers all tokens of texts have",
}
"""Why a family is trained otherwise here than by the other trainers, or than by the one that it follows."""


def list_rules(family: str) -> Sequence[tuple[str, TargetRule]]:
    """List the rules of the trainers that have the model."""
    return [(program, RULES[program][family]) for program in PROGRAMS if family in RULES[program]]
