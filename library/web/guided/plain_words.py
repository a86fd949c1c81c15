"""Words for people: labels of options and a sentence for each family, where names say little to a beginner."""

from collections.abc import Mapping

from ...models.facts import FamilyFacts

FIRST_FIELDS: Mapping[str, tuple[str, str]] = {
    "output_name": ("Name of the LoRA", "the file is called so"),
    "max_train_steps": ("Steps", "how long it learns; more is not always better"),
    "learning_rate": ("Learning rate", "how much each step changes"),
    "network_dim": ("Size", "how much the LoRA can hold; its file grows with it"),
    "network_alpha": ("Strength", "often as large as the size, or half of it"),
    "resolution": ("Picture size", "in pixels; pictures are made as large as its square"),
    "train_batch_size": ("Pictures at once", "more are faster and need more memory"),
    "optimizer_type": ("Optimizer", "Prodigy finds the learning rate itself; give it 1"),
    "lr_scheduler": ("Course of the learning rate", "cosine ends gently"),
    "save_every_n_steps": ("Save a file every … steps", "to choose the best one later"),
    "sample_every_n_steps": ("Preview pictures every … steps", "from the texts below"),
    "gpu_memory": ("Memory of the card", "what makes the run fit is chosen by it"),
}
"""The twelve fields that are shown at first, with their label and a few words."""

FAMILY_SENTENCES: Mapping[str, str] = {
    "sd1": "The classic: small, quick to train on any card, with the most LoRAs of others to combine with.",
    "sd2": "The follower of the classic; few programs and LoRAs are made for it.",
    "sdxl": "Large pictures on cards from 8 GB; the base of most models of drawings and anime.",
    "sd3": "A transformer that follows long texts and writes words into pictures.",
    "flux": "Excellent photographs and texts in pictures; large, so cards from 16 GB are comfortable.",
    "flux_kontext": "FLUX.1 that edits a picture by a sentence; it is trained on pairs of pictures.",
    "chroma": "FLUX.1 made smaller and trained anew, with a free licence.",
    "flux2_dev": "The largest FLUX: the best pictures, for cards from 32 GB or several.",
    "flux2_klein": "A smaller FLUX.2, made for training at home.",
    "flux3": "The newest FLUX at a size for one card.",
    "z_image": "Small and quick for its quality; one of the best choices for cards from 12 GB.",
    "z_image_omni": "Z-Image that follows other pictures, too; trained on pictures with up to three references.",
    "qwen_image": "Follows long texts very well, in English and Chinese; large.",
    "qwen_image21": "A smaller Qwen-Image that fits on one card.",
    "qwen_image_layered": "Takes a picture apart into layers; it is trained on pictures with their layers.",
    "qwen_image_edit": "Qwen-Image that edits a picture by a sentence; it is trained on pairs of pictures.",
    "joyimage_edit": "Edits a picture by a sentence, large; it is trained on pairs of pictures, or on pictures alone.",
    "joyimage_edit_plus": "Makes one picture of up to six others by a sentence; large.",
    "bria_fibo2": "Follows captions of JSON in every detail, and edits pictures; large.",
    "sana": "Very quick: it makes large pictures from a strongly compressed form.",
    "lumina2": "Small and free, with good drawings.",
    "kolors": "An SDXL that understands Chinese.",
    "hidream": "Large, with four text encoders; very good at following texts.",
    "aura_flow": "Free, and good at following texts.",
    "ovis_image": "Made for words in pictures.",
    "longcat_image": "Small for its quality; follows texts in English and Chinese.",
    "ernie_image": "Train on the base model: the Turbo loses its few steps.",
    "krea2": "Photographs with a natural look; train on Raw: the Turbo loses its few steps.",
    "ideogram4": "Made for words in pictures and for layouts; reads captions of JSON, and plain ones.",
    "cogview4": "Follows texts in English and Chinese.",
    "glm_image": "Learns how things are drawn; what is in a picture is decided by another model, which is not trained.",
    "pixart_sigma": "Very small; one of the lightest to train.",
    "prx": "Small, and quick to train; made for pictures of 512 pixels.",
    "prx_pixel": "Without a compressed form: it makes the pixels themselves, at 1024; large, for cards from 16 GB.",
    "nucleus_image": "Large, but quick for its size: a picture uses 2 of its 17 billion weights.",
    "wan": "Short videos; trained on pictures it learns what things look like.",
    "wan_vace": "Videos that follow another one: poses, depth, lines, or a part of it that is painted anew.",
    "wan_fun_control": "Videos that follow another one, such as poses, depth or lines; also from their first picture.",
    "wan_fun_control11": "Videos that follow another one and a picture of what to show; also from their first picture.",
    "wan22_fun_control": "Two models in one, for the largest cards: videos that follow another one and a picture.",
    "wan_animate": "Videos in which the person of a picture moves and looks like another; trained on clips only.",
    "hunyuan_video": "Videos; trained on pictures it learns what things look like.",
    "hunyuan_video_i2v": "Videos that go on from a first picture; trained on clips only, not on pictures.",
    "framepack": "Long videos that go on from a first picture, part by part; trained on clips only, not on pictures.",
    "kandinsky5_i2v": "Videos that go on from a first picture, which is given; small or very large.",
    "kandinsky6_video": "Videos with sound, which it can learn as well; small or very large.",
    "cosmos2_text2image": "Pictures of places and things as cameras see them; small or large.",
    "cosmos2_video2world": "Videos that go on from a first picture, as cameras of robots and cars see; small or large.",
    "ltx_video": "Quick, short videos on small cards.",
    "ltx2": "Videos with sound, of which it learns the pictures; very large, so cards from 32 GB.",
    "minimax_h3": "Videos with sound, of which it learns the pictures; one of the largest, so cards from 48 GB.",
}

_KINDS = {
    "image": "Makes pictures from a text.",
    "edit": "Changes a picture that it is given; it is trained on pairs of pictures.",
    "video": "Makes videos; trained on pictures it learns what things look like.",
}


def describe_family(name: str, facts: FamilyFacts) -> str:
    """Return one sentence about a family; made from its facts where none was written."""
    return FAMILY_SENTENCES.get(name) or _KINDS[facts.pipeline.kind]
