"""Which engine a command asks for, and whether it can be had: the part of the table of settings that is about them."""

from collections.abc import Mapping

from ..config import RunConfig
from .claims import Claim, Sources, Verdict, decide, word
from .refusals import NOT_THERE
from .sharding import OURS, REFUSED, WITHOUT_EFFECT, asked_for, spoken
from .start import PARADIGMS, Start
from .world import ENGINES, World, truth
from .zero_settings import LAUNCHED, zero_problems

DEFAULT = "default"
FLAGS = {"DeepSpeed": "use_deepspeed", "FSDP": "use_fsdp", "Megatron-LM": "use_megatron_lm",
         "a parallelism config": "use_parallelism_config"}  # fmt: skip
TYPES = {"DEEPSPEED": "DeepSpeed", "FSDP": "FSDP", "MEGATRON_LM": "Megatron-LM"}
"""Words for ``distributed_type`` in accelerate's own file."""
OPTIONS = {"FSDP": "fsdp", "DeepSpeed": "deepspeed"}


def engine_verdicts(sources: Sources, start: Start) -> list[Verdict]:
    """One line for each engine."""
    verdicts = {engine: _asked(sources, engine, variable) for variable, engine in ENGINES.items()}
    for engine, why in NOT_THERE.items():
        if verdicts[engine].value == "on":
            text = f"{why}, which {verdicts[engine].winner} asks for; use --multi_gpu, FSDP or DeepSpeed"
            verdicts[engine] = _error(verdicts[engine], text)
    launched = tuple(engine for engine, verdict in verdicts.items() if verdict.value == "on")
    for engine, option in OPTIONS.items():
        verdicts[engine] = _with_ours(verdicts[engine], sources.code(option))
    world = World(size=start.processes or 1, local_rank=0 if start.several else None, engines=launched,
                  said=_said(sources))  # fmt: skip
    config = sources.config or RunConfig()
    wrong = {"FSDP": asked_for(config, world).problems, "DeepSpeed": zero_problems(config, world)}
    for engine, problems in wrong.items():
        told = [problem for problem in problems if start.processes is not None or "number of processes" not in problem]
        if told and not any(missing in NOT_THERE for missing in launched):
            verdicts[engine] = _error(verdicts[engine], "; ".join(told))
    return list(verdicts.values())


def _with_ours(launched: Verdict, own: Claim | None) -> Verdict:
    """Our own option comes before what the launcher says."""
    if own is not None:
        own = Claim(own.place, "on" if truth(own.value) else "off")
    said = (Claim(launched.winner, launched.value),) if launched.value == "on" else ()
    return decide(launched.setting, [own, *said, *launched.losers], Claim(DEFAULT, "off"))


def _asked(sources: Sources, engine: str, variable: str) -> Verdict:
    claims = [_on(sources.flag(FLAGS[engine])), _on(sources.variable(variable))]
    given = sources.launch.given if sources.by_accelerate and sources.launch else {}
    if sources.file is not None and not any(given.get(name) for name in PARADIGMS):
        in_file = TYPES.get(sources.file.distributed_type) == engine
        if engine == "a parallelism config":
            in_file = bool(sources.file.content.get("parallelism_config"))
        claims.append(Claim(f"{sources.file.path}", "on") if in_file else None)
    return decide(engine, claims, Claim(DEFAULT, "off"))


def _said(sources: Sources) -> Mapping[str, str]:
    """The variables that the script will find; where accelerate launches, it sets them itself."""
    of_fsdp = {*REFUSED, *WITHOUT_EFFECT, *(variable for variable, _ in OURS.values()), "FSDP_TRANSFORMER_CLS_TO_WRAP",
               "FSDP_ACTIVATION_CHECKPOINTING"}  # fmt: skip
    names = {**{name: spoken(name) for name in of_fsdp}, **LAUNCHED}
    if not sources.by_accelerate or sources.launch is None:
        return {name: sources.environment[name] for name in names if sources.environment.get(name)}
    content = sources.file.content if sources.file is not None else {}
    filed = {**(content.get("fsdp_config") or {}), **(content.get("parallelism_config") or {})}
    given = {"fsdp_version": "1", **{key if "_config_" in key else f"fsdp_{key.removeprefix('fsdp_')}": value
                                     for key, value in filed.items()}, **(content.get("deepspeed_config") or {}),
             **sources.launch.given}  # fmt: skip
    return {name: word(given[said]) for name, said in names.items() if given.get(said) is not None}


def _on(claim: Claim | None) -> Claim | None:
    """Only a yes asks for something."""
    return Claim(claim.place, "on", claim.is_filed) if claim is not None and truth(claim.value) else None


def _error(verdict: Verdict, text: str) -> Verdict:
    return Verdict(verdict.setting, verdict.value, verdict.winner, verdict.losers, text, is_error=True)
