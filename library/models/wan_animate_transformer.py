"""The transformer of Wan 2.2 Animate with the attention to faces inside of its blocks; diffusers has it between them.

What passes from a block to the next is then all that later blocks need, so that pipeline stages can begin with any
block.  And a block may get some of the tokens only, as with context parallelism.
"""

from typing import Any

import torch
from diffusers import WanAnimateTransformer3DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_wan_animate import WanTransformerBlock
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ..registry import copy_class_name

_block: Any = WanTransformerBlock
_transformer: Any = WanAnimateTransformer3DModel


class FaceBlock(_block):  # type: ignore[misc]
    """diffusers' block, and behind it the attention to the face, whose weights belong to the transformer."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: Any,
        motion: Tensor | None = None,
        token_frames: Tensor | None = None,
        num_tokens: int = 0,
    ) -> Tensor:
        """Run the block; ``token_frames`` has the latent frame of each token, of which there are ``num_tokens``."""
        output: Tensor = super().forward(hidden_states, encoder_hidden_states, temb, rotary_emb)
        if motion is None or token_frames is None:
            return output
        (adapter,) = self.face_adapters
        is_whole = output.shape[1] == num_tokens
        added = adapter(output, motion) if is_whole else attend_to_faces(adapter, output, motion, token_frames)
        output = output + added
        return output


def attend_to_faces(adapter: Any, hidden_states: Tensor, motion: Tensor, token_frames: Tensor) -> Tensor:
    """Let any tokens attend to what is known of the face in their own frames (B, frames, keys, width)."""
    heads, num_keys = (adapter.heads, -1), motion.shape[2]
    faces = adapter.pre_norm_kv(motion).flatten(1, 2)
    query = adapter.norm_q(adapter.to_q(adapter.pre_norm_q(hidden_states)).unflatten(2, heads))
    key = adapter.norm_k(adapter.to_k(faces).unflatten(2, heads))
    value = adapter.to_v(faces).unflatten(2, heads)
    key_frames = torch.arange(motion.shape[1], device=motion.device).repeat_interleave(num_keys)
    mask = token_frames[:, None] == key_frames
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    attended = scaled_dot_product_attention(query, key, value, attn_mask=mask)
    output: Tensor = adapter.to_out(attended.transpose(1, 2).flatten(2).type_as(query))
    return output


class FaceTransformer(_transformer):  # type: ignore[misc]
    """diffusers' transformer over such blocks."""

    def __repr__(self) -> str:
        """Name the class alone, as DeepSpeed prints models whose weights ZeRO 3 has partitioned.

        Layers of the motion encoder look for their sizes in the shape of the weight, which has one dimension then.
        """
        return f"{type(self).__name__}()"

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        pose_hidden_states: Tensor | None = None,
        face_pixel_values: Tensor | None = None,
        motion_encode_batch_size: int | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Predict the velocity of the latents; see diffusers' class, which needs poses and the face as well."""
        if pose_hidden_states is None or face_pixel_values is None:
            raise ValueError("the poses and the face are needed: pose_hidden_states, face_pixel_values")
        patches = zip(hidden_states.shape[2:], self.config.patch_size, strict=True)
        frames, rows, columns = (side // patch for side, patch in patches)
        rotation = self.rope(hidden_states)
        states, poses = self.patch_embedding(hidden_states), self.pose_patch_embedding(pose_hidden_states)
        states = torch.cat([states[:, :, :1], states[:, :, 1:] + poses], dim=2)
        states = states.flatten(2).transpose(1, 2).contiguous()
        time, modulation, text, image = self.condition_embedder(
            timestep, encoder_hidden_states, encoder_hidden_states_image, timestep_seq_len=None
        )
        text = text if image is None else torch.cat([image, text], dim=1)
        motion = self._encode_motion(face_pixel_values, motion_encode_batch_size)
        token_frames = torch.arange(frames, device=states.device).repeat_interleave(rows * columns)
        for number, block in enumerate(self.blocks):
            has_face = number % self.config.inject_face_latents_blocks == 0
            face = (motion, token_frames, frames * rows * columns) if has_face else ()
            states = self._run_block(block, states, text, modulation.unflatten(1, (6, -1)), rotation, *face)
        shift, scale = (self.scale_shift_table.to(time.device) + time.unsqueeze(1)).to(states.device).chunk(2, dim=1)
        states = (self.norm_out(states.float()) * (1 + scale) + shift).to(states.dtype)
        output = self.proj_out(states).unflatten(2, (*self.config.patch_size, -1)).unflatten(1, (frames, rows, columns))
        output = output.permute((0, 7, 1, 4, 2, 5, 3, 6)).flatten(6, 7).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _run_block(self, block: Any, *args: Any) -> Tensor:
        is_checkpointed = torch.is_grad_enabled() and self.gradient_checkpointing
        output: Tensor = self._gradient_checkpointing_func(block, *args) if is_checkpointed else block(*args)
        return output

    def _encode_motion(self, faces: Tensor, batch_size: int | None) -> Tensor:
        """Encode the frames of a face (B, 3, frames, side, side), some at a time, with zeros for the first latents."""
        frames = faces.transpose(1, 2).flatten(0, 1)
        parts = torch.split(frames, batch_size or self.config.motion_encoder_batch_size)
        vectors = torch.cat([self.motion_encoder(part) for part in parts])
        motion = self.face_encoder(vectors.view(len(faces), -1, vectors.shape[-1]))
        return torch.cat([torch.zeros_like(motion[:, :1]), motion], dim=1)


def put_faces_into_blocks(denoiser: nn.Module) -> None:
    """Let the blocks of a transformer of diffusers attend to the face themselves; its weights keep their names."""
    transformer: Any = denoiser
    face_block, face_transformer = copy_class_name(FaceBlock, _block), copy_class_name(FaceTransformer, _transformer)
    for number, adapter in enumerate(transformer.face_adapter):
        block = transformer.blocks[number * transformer.config.inject_face_latents_blocks]
        block.__class__ = face_block
        block.face_adapters = (adapter,)  # in a tuple, so that it is no part of the block
    transformer.__class__ = face_transformer
