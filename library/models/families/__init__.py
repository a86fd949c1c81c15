"""The model families by name: the ``FAMILIES`` table of classes, and ``FAMILY_FACTS``, what detection knows of each.

A family is one file of this folder, its configurations in ``models/configs/``, and one line in the table below; see
docs/adding_a_family.md.  No file of a family imports torch when it is imported.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...registry import Registry
from ..facts import FamilyFacts

if TYPE_CHECKING:
    from ..base import Family

FAMILIES: "Registry[type[Family]]" = Registry(
    "model family",
    __package__,
    {
        "sd1": ".sd1_sd2:StableDiffusion1",
        "sd2": ".sd1_sd2:StableDiffusion2",
        "sdxl": ".sdxl:StableDiffusionXL",
        "sd1_inpainting": ".unet_inpainting:StableDiffusion1Inpainting",
        "sd2_inpainting": ".unet_inpainting:StableDiffusion2Inpainting",
        "sdxl_inpainting": ".unet_inpainting:StableDiffusionXLInpainting",
        "sd1_pix2pix": ".unet_editing:InstructPix2Pix",
        "sdxl_pix2pix": ".unet_editing:InstructPix2PixXL",
        "sdxl_refiner": ".sdxl_refiner:StableDiffusionXLRefiner",
        "sd3": ".sd3:StableDiffusion3",
        "flux": ".flux:Flux",
        "flux_kontext": ".flux_kontext:FluxKontext",
        "flux_fill": ".flux_control:FluxFill",
        "flux_control": ".flux_control:FluxControl",
        "chroma": ".chroma:Chroma",
        "flux2_dev": ".flux2:Flux2Dev",
        "flux2_klein": ".flux2:Flux2Klein",
        "flux3": ".flux3:Flux3",
        "z_image": ".z_image:ZImage",
        "z_image_omni": ".z_image_omni:ZImageOmni",
        "qwen_image": ".qwen_image:QwenImage",
        "qwen_image21": ".qwen_image21:QwenImage21",
        "qwen_image_edit": ".qwen_image_edit:QwenImageEdit",
        "qwen_image_layered": ".qwen_image_layered:QwenImageLayered",
        "qwen_image_edit_plus": ".qwen_image_edit:QwenImageEditPlus",
        "joyimage_edit": ".joyimage_edit:JoyImageEdit",
        "joyimage_edit_plus": ".joyimage_edit:JoyImageEditPlus",
        "aura_flow": ".aura_flow:AuraFlow",
        "ovis_image": ".ovis_image:OvisImage",
        "bria": ".bria:Bria",
        "bria_fibo": ".bria_fibo:BriaFibo",
        "bria_fibo_edit": ".bria_fibo_edit:BriaFiboEdit",
        "bria_fibo2": ".bria_fibo2:BriaFibo2",
        "longcat_image": ".longcat_image:LongCatImage",
        "longcat_image_edit": ".longcat_image_edit:LongCatImageEdit",
        "ernie_image": ".ernie_image:ErnieImage",
        "lumina2": ".lumina2:Lumina2",
        "krea2": ".krea2:Krea2",
        "sana": ".sana:Sana",
        "cogview4": ".cogview4:CogView4",
        "glm_image": ".glm_image:GlmImage",
        "hidream": ".hidream:HiDream",
        "kolors": ".kolors:Kolors",
        "kandinsky5_image": ".kandinsky5_image:Kandinsky5Image",
        "pixart_sigma": ".pixart_sigma:PixArtSigma",
        "prx": ".prx:PRX",
        "prx_pixel": ".prx_pixel:PRXPixel",
        "nucleus_image": ".nucleus_image:NucleusImage",
        "ideogram4": ".ideogram4:Ideogram4",
        "anima": ".anima:Anima",
        "cosmos2_text2image": ".cosmos2:Cosmos2TextToImage",
        "hunyuan_image": ".hunyuan_image:HunyuanImage",
        "wan": ".wan:Wan",
        "wan_i2v": ".wan_i2v:WanI2V",
        "wan_flf2v": ".wan_i2v:WanFLF2V",
        "wan_vace": ".wan_vace:WanVACE",
        "wan_fun_control": ".wan_fun_control:WanFunControl",
        "wan_fun_control11": ".wan_fun_control:WanFunControl11",
        "wan_animate": ".wan_animate:WanAnimate",
        "wan22_t2v": ".wan22_experts:WanT2VExperts",
        "wan22_i2v": ".wan22_experts:WanI2VExperts",
        "wan22_fun_control": ".wan_fun_control:WanFunControlExperts",
        "wan22_ti2v": ".wan22_ti2v:WanTI2V",
        "skyreels_v2": ".skyreels_v2:SkyReelsV2",
        "skyreels_v2_i2v": ".skyreels_v2:SkyReelsV2I2V",
        "hunyuan_video15": ".hunyuan_video15:HunyuanVideo15",
        "hunyuan_video15_i2v": ".hunyuan_video15_i2v:HunyuanVideo15I2V",
        "ltx_video": ".ltx_video:LTXVideo",
        "ltx_video095": ".ltx_video095:LTXVideo095",
        "ltx2": ".ltx2:LTX2",
        "hunyuan_video": ".hunyuan_video:HunyuanVideo",
        "hunyuan_video_i2v": ".hunyuan_video_i2v:HunyuanVideoI2V",
        "hunyuan_video_33ch_i2v": ".hunyuan_video_i2v:HunyuanVideoI2V33Channels",
        "framepack": ".framepack:FramePack",
        "cogvideox": ".cogvideox:CogVideoX",
        "cogvideox15": ".cogvideox15:CogVideoX15",
        "mochi": ".mochi:Mochi",
        "kandinsky5_video": ".kandinsky5_video:Kandinsky5Video",
        "kandinsky5_i2v": ".kandinsky5_video:Kandinsky5I2V",
        "kandinsky6_video": ".kandinsky6_video:Kandinsky6Video",
        "cosmos2_video2world": ".cosmos2:Cosmos2VideoToWorld",
        "sana_video": ".sana_video:SanaVideo",
        "minimax_h3": ".minimax_h3:MiniMaxH3",
    },
)

FAMILY_FACTS: Mapping[str, FamilyFacts] = {name: FAMILIES.get(name).facts for name in FAMILIES.entries}

CONTROL_FAMILIES: Mapping[str, Mapping[str, str]] = {
    "flux": {
        "omini": f"{__package__}.flux_omini:FluxOmini",
        "channels": f"{__package__}.channel_control:FluxChannelControl",
    },
    "sd1": {"channels": f"{__package__}.channel_control:StableDiffusion1ChannelControl"},
}
"""The values of ``--control`` that each family supports, and the family that trains each of them."""

IMAGE_TO_VIDEO_FAMILIES: Mapping[str, str] = {
    "wan_fun_control": f"{__package__}.wan_fun_control:WanFunControlFromImage",
    "wan_fun_control11": f"{__package__}.wan_fun_control:WanFunControl11FromImage",
    "wan22_fun_control": f"{__package__}.wan_fun_control:WanFunControlFromImageExperts",
    "wan22_ti2v": f"{__package__}.wan22_ti2v:WanTI2VFromImage",
    "ltx_video095": f"{__package__}.ltx_video095:LTXVideo095FromImage",
    "ltx2": f"{__package__}.ltx2:LTX2FromImage",
    "kandinsky6_video": f"{__package__}.kandinsky6_video:Kandinsky6VideoFromImage",
}
"""The family that trains with ``--image_to_video`` in place of each of these."""

ONE_FRAME_FAMILIES: Mapping[str, str] = {"framepack": f"{__package__}.framepack_one_frame:FramePackOneFrame"}
"""The family that trains with ``--one_frame`` in place of each of these."""

SOUND_FAMILIES: Mapping[str, str] = {
    "ltx2": f"{__package__}.ltx2:LTX2WithSound",
    IMAGE_TO_VIDEO_FAMILIES["ltx2"]: f"{__package__}.ltx2:LTX2FromImageWithSound",
    "kandinsky6_video": f"{__package__}.kandinsky6_video:Kandinsky6VideoWithSound",
    IMAGE_TO_VIDEO_FAMILIES["kandinsky6_video"]: f"{__package__}.kandinsky6_video:Kandinsky6VideoFromImageWithSound",
    "minimax_h3": f"{__package__}.minimax_h3:MiniMaxH3WithSound",
}
"""The family that trains with ``--train_audio`` in place of each of these."""

_EXPERT_ENDS = {"high_noise": "HighNoise", "low_noise": "LowNoise"}
EXPERT_FAMILIES: Mapping[str, Mapping[str, str]] = {
    name: {expert: f"{__package__}.{title}{end}" for expert, end in _EXPERT_ENDS.items()}
    for name, title in (
        ("wan22_t2v", "wan22_experts:WanT2V"),
        ("wan22_i2v", "wan22_experts:WanI2V"),
        ("wan22_fun_control", "wan_fun_control:WanFunControl"),
        (IMAGE_TO_VIDEO_FAMILIES["wan22_fun_control"], "wan_fun_control:WanFunControlFromImage"),
    )
}
"""The values of ``--noise_experts`` of each family of two experts, and the family that trains that one alone."""
