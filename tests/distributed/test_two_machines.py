"""Two machines in network namespaces train the same LoRA as one machine with two processes.

``python tests/support/two_machines.py`` measures slow and high-latency networks, and one whose link goes down.
"""

import pytest
import torch
from network_namespaces import Machines, describe_missing_support, launch_on_both_machines
from rank_processes import find_free_port, run_on_ranks
from safetensors.torch import load_file
from training_runs import train, write_images


@pytest.mark.skipif(bool(describe_missing_support()), reason=describe_missing_support())
def test_two_machines_train_the_same_lora_as_one_without_sending_the_frozen_model(tmp_path):
    dataset = write_images(tmp_path / "data", {(96, 64): 5, (64, 64): 3})
    flags = (
        "--pretrained_model_name_or_path random:sd1:tiny --network_dim 2 --max_train_steps 4 --learning_rate 1e-2 "
        "--mixed_precision no --max_data_loader_n_workers 0 --network_train_unet_only"
    )
    settings = ["--dataset_config", str(dataset), *flags.split()]
    with Machines() as machines:
        codes, texts = launch_on_both_machines(
            machines, ["train_lora.py", *settings, "--output_dir", str(tmp_path / "two")], tmp_path, find_free_port()
        )
        sent_bytes = [machines.count_sent_bytes(machine) for machine in (0, 1)]
    assert codes == [0, 0], texts
    assert "2 processes on 2 machines: rank 0 on gpu-a; rank 1 on gpu-b" in texts[0] and "rank 0 on" not in texts[1]
    assert max(sent_bytes) < 4e6, sent_bytes  # the first message is 2 MB, sent twice; the model has 3.6 MB
    run_on_ranks(2, train, *settings, "--output_dir", str(tmp_path / "one"))
    one, two = (load_file(tmp_path / name / "lora.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
