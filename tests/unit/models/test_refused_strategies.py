"""What a model's facts refuse is refused with the options, before a model is loaded, and so in dry runs and plans."""

from problem_lines import format_lines

from library.config import parse_config
from library.models.families import FAMILIES
from library.models.own_families import get_family_facts
from library.models.validate_options import validate_model_options

FLAGS = {"tp": "--tp_size 2", "pp": "--pp_size 2", "cp": "--cp_size 2", "compile": "--torch_compile"}


def list_problems(model: str, flags: str) -> list[str]:
    parsed = parse_config(["--pretrained_model_name_or_path", f"random:{model}:tiny", *flags.split()])
    return format_lines(validate_model_options(parsed.config, {}))


def test_every_model_refuses_the_strategies_that_its_facts_exclude_and_no_others():
    for model in FAMILIES.list_names():
        reasons = dict(get_family_facts(model).blocks.unsupported_strategies)
        if not get_family_facts(model).blocks.lists:
            reasons.setdefault("cp", "has convolutions, which cannot be split by tokens")
        for name, flags in FLAGS.items():
            refused = [line for line in list_problems(model, flags) if line.startswith(flags.split()[0])]
            assert len(refused) == (name in reasons), (model, name, refused)
            assert all(reasons[name] in line for line in refused)


def test_graphs_are_refused_beside_a_split():
    lines = list_problems("nucleus_image", "--cp_size 2 --tp_size 2 --cuda_graphs")
    assert [line.partition(":")[0] for line in lines] == ["--tp_size 2", "--cp_size 2", "--cuda_graphs"]
