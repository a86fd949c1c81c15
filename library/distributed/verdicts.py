"""Which of several settings counts: for everything that code, launcher, its file and the environment can set."""

from collections.abc import Callable
from dataclasses import replace

from .backend import group_backend
from .claims import Claim, Sources, Verdict, decide, word
from .engine_verdicts import engine_verdicts
from .start import Start, how_it_starts, too_few
from .world import chosen_device, truth

DEFAULT = "default"


def verdicts(sources: Sources) -> list[Verdict]:
    """One line for each setting, in the order in which people ask for them."""
    start = how_it_starts(sources)
    found = [rule(sources, start) for rule in _RULES]
    return [*found, *_dynamo(sources), *engine_verdicts(sources, start)]


def _precision(sources: Sources, start: Start) -> Verdict:
    name, default = "ACCELERATE_MIXED_PRECISION", Claim(DEFAULT, "no")
    claims = [sources.code("mixed_precision"), sources.flag("mixed_precision"), sources.filed("mixed_precision")]
    if sources.by_accelerate:
        verdict = decide("precision", claims, default, [sources.overwritten(name)])
    else:
        verdict = decide("precision", [claims[0], sources.variable(name)], default)
    if verdict.value != "fp16" or _device(sources, start).value != "cpu":
        return verdict
    text = f"precision: {verdict.winner} says fp16, which a CPU does not have"
    if claims[0] is not None:
        return replace(verdict, contradiction=f"{text}; use bf16 or no", is_error=True)
    losers = (Claim(verdict.winner, verdict.value), *verdict.losers)
    return Verdict("precision", "no", "this device", losers, f"{text}; it computes in fp32")


def _processes(sources: Sources, start: Start) -> Verdict:
    count = "as many as join" if start.processes is None else str(start.processes)
    if sources.by_accelerate:
        default = Claim(f"{DEFAULT} (one for each device)", count)
        verdict = decide("processes", [sources.flag("num_processes"), sources.filed("num_processes")], default,
                         [sources.overwritten("WORLD_SIZE")] if start.several else [])  # fmt: skip
    else:
        verdict = decide("processes", [start.asked], Claim(DEFAULT, count))
    problem = "" if start.processes is None else too_few(sources, start.processes)
    verdict = replace(verdict, value=count)
    return replace(verdict, contradiction=f"processes: {problem}", is_error=True) if problem else verdict


def _machines(sources: Sources, start: Start) -> Verdict:
    if sources.by_torchrun:
        return decide("machines", [sources.flag("nnodes"), sources.variable("PET_NNODES")], Claim(DEFAULT, "1"))
    claims = [sources.flag("num_machines"), sources.filed("num_machines")] if sources.by_accelerate else []
    return decide("machines", claims, Claim(DEFAULT, "1"))


def _machine_rank(sources: Sources, start: Start) -> Verdict:
    if sources.by_torchrun:
        claims = [sources.flag("node_rank"), sources.variable("PET_NODE_RANK")]
    else:
        claims = [sources.flag("machine_rank"), sources.filed("machine_rank")] if sources.by_accelerate else []
    return decide("rank of this machine", claims, Claim(DEFAULT, "0"))


def _main_address(sources: Sources, start: Start) -> Verdict:
    if sources.by_torchrun:
        claims = [sources.flag("master_addr"), sources.variable("PET_MASTER_ADDR")]
        return decide("main address", claims, Claim(DEFAULT, "127.0.0.1"))
    if not sources.by_accelerate:
        return decide("main address", [sources.variable("MASTER_ADDR")], Claim(DEFAULT, "none: one process"))
    claims = [sources.flag("main_process_ip"), sources.filed("main_process_ip")]
    if (start.machines or 1) > 1:
        return decide("main address", claims, Claim(DEFAULT, "missing"), [sources.overwritten("MASTER_ADDR")])
    unread = tuple(Claim(f"{claim.place} (read with several machines only)", claim.value) for claim in claims if claim)
    return Verdict("main address", "127.0.0.1" if start.several else "none: one process", DEFAULT, unread)


def _main_port(sources: Sources, start: Start) -> Verdict:
    if sources.by_torchrun:
        claims = [sources.flag("master_port"), sources.variable("PET_MASTER_PORT")]
        return decide("main port", claims, Claim(DEFAULT, "a free one" if sources.flag("standalone") else "29500"))
    if not sources.by_accelerate:
        return decide("main port", [sources.variable("MASTER_PORT")], Claim(DEFAULT, "none: one process"))
    claims = [sources.flag("main_process_port"), sources.filed("main_process_port")]
    if not start.several:
        return Verdict("main port", "none: one process", DEFAULT, tuple(claim for claim in claims if claim))
    verdict = decide("main port", claims, Claim(DEFAULT, "29500"), [sources.overwritten("MASTER_PORT")])
    return replace(verdict, value="a free one") if verdict.value == "0" else verdict


def _device(sources: Sources, start: Start) -> Verdict:
    forced, allowed = sources.variable("ACCELERATE_TORCH_DEVICE"), sources.variable("ACCELERATE_USE_CPU")
    here = Claim("what there is", sources.machine.device)
    unread: list[Claim | None] = []
    claims = [_cpu(allowed)]
    if sources.by_accelerate and start.several:
        unread = [_cpu(sources.filed("use_cpu"), " (not read for several processes)")]
    elif sources.by_accelerate:
        claims = [_cpu(sources.flag("cpu")), _cpu(sources.filed("use_cpu"))]
        unread = [_cpu(sources.overwritten("ACCELERATE_USE_CPU"))]
    if forced is not None:
        forced = Claim(forced.place, chosen_device(sources.environment, sources.machine))
    return decide("device", [forced, *claims], here, unread)


def _cpu(claim: Claim | None, note: str = "") -> Claim | None:
    """Only a yes says something about the device."""
    return replace(claim, place=claim.place + note, value="cpu") if claim is not None and truth(claim.value) else None


def _backend(sources: Sources, start: Start) -> Verdict:
    device = _device(sources, start).value
    if not start.several:
        return Verdict("backend", "none: one process", "number of processes")
    chosen = group_backend(device, sources.windows) or f"what belongs to {device}"
    return Verdict("backend", chosen, "Windows" if sources.windows else f"device {device}")


def _accumulation(sources: Sources, start: Start) -> Verdict:
    setting, name = "gradient accumulation", "gradient_accumulation_steps"
    own = sources.code(name) or (Claim(DEFAULT, word(sources.option(name))) if sources.config else None)
    flag = sources.flag(name) if sources.by_accelerate else None
    if flag is not None:
        flag = Claim(f"{flag.place} (handed to DeepSpeed only)", flag.value)
    verdict = decide(setting, [sources.variable("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), own], Claim(DEFAULT, "1"),
                     [flag])  # fmt: skip
    if not verdict.contradiction:
        return verdict
    return replace(verdict, is_error=True, contradiction=f"{verdict.contradiction}; say it once, as --{name} behind "
                                                         "the script")  # fmt: skip


def _affinity(sources: Sources, start: Start) -> Verdict:
    setting, machine = "NUMA affinity", sources.machine
    flag = _yes(sources.flag("enable_cpu_affinity")) if sources.by_accelerate else None
    variable = sources.variable("ACCELERATE_CPU_AFFINITY")
    filed = _yes(sources.filed("enable_cpu_affinity"), " (accelerate does not read it there)")
    if variable is not None:
        variable = Claim(variable.place, "on" if truth(variable.value) else "off")
    reason = machine.affinity_obstacle if machine.numa_nodes > 1 else "one NUMA node"
    own = Claim(f"{machine.numa_nodes} NUMA nodes", "on") if machine.numa_nodes > 1 and not reason else None
    verdict = decide(setting, [flag, variable, own], Claim(f"{DEFAULT}: {reason}", "off"), [filed])
    if verdict.value == "on" and machine.affinity_obstacle:
        is_error = machine.device == "cuda" and "missing" in machine.affinity_obstacle
        text = f"{setting}: {verdict.winner} says on, but {machine.affinity_obstacle}"
        return replace(verdict, contradiction=text, is_error=is_error)
    return verdict


def _yes(claim: Claim | None, note: str = "") -> Claim | None:
    return replace(claim, place=claim.place + note, value="on") if claim is not None and truth(claim.value) else None


def _threads(sources: Sources, start: Start) -> Verdict:
    setting, variable = "CPU threads", sources.variable("OMP_NUM_THREADS")
    cores = sources.machine.cores
    if sources.by_torchrun:
        return decide(setting, [variable], Claim(DEFAULT, "1" if start.several else str(cores)))
    if not sources.by_accelerate:
        return decide(setting, [variable], Claim(f"{DEFAULT} (cores)", str(cores)))
    cpu = sources.filed("use_cpu") if sources.file else sources.flag("cpu")
    share = 1
    if cpu is not None and truth(cpu.value):
        asked = int(start.asked.value) if start.asked else 1 if sources.file else sources.machine.device_count
        share = cores // max(asked // (start.machines or 1), 1) if asked >= 1 else 1
    default = Claim(f"{DEFAULT} (cores for each process)" if share > 1 else DEFAULT, str(max(share, 1)))
    return decide(setting, [sources.flag("num_cpu_threads_per_process"), variable], default)


def _dynamo(sources: Sources) -> list[Verdict]:
    """Backend first; without one the rest means nothing."""
    backend = _of_dynamo(sources, "dynamo backend", "dynamo_backend", "dynamo_backend", "BACKEND", "no")
    if backend.value == "no":
        return [backend]
    rows = (("mode", "dynamo_mode", "dynamo_mode", "MODE", "default"),
            ("full graph", "dynamo_fullgraph", "dynamo_use_fullgraph", "USE_FULLGRAPH", "false"),
            ("dynamic shapes", "compile_shapes", "dynamo_use_dynamic", "USE_DYNAMIC",
             "false" if sources.by_accelerate else "automatic"),
            ("regional compilation", "dynamo_use_regional_compilation", "dynamo_use_regional_compilation",
             "USE_REGIONAL_COMPILATION", "false"))  # fmt: skip
    return [backend, *(_of_dynamo(sources, f"dynamo {row[0]}", *row[1:]) for row in rows)]


def _of_dynamo(sources: Sources, setting: str, option: str, flag: str, variable: str, default: str) -> Verdict:
    variable = f"ACCELERATE_DYNAMO_{variable}"
    launcher = [sources.flag(flag), sources.filed(flag)] if sources.by_accelerate else [sources.variable(variable)]
    unread = [sources.overwritten(variable)] if sources.by_accelerate else []
    if (wanted := sources.option("torch_compile")) is None:
        return decide(setting, map(_small, launcher), Claim(DEFAULT, default), map(_small, unread))
    place = sources.places.get("torch_compile", "--torch_compile")
    value = sources.option(option) if wanted else "no"
    own = Claim(sources.places.get(option, place), _SHAPES.get(value, word(value)))
    return decide(setting, [own, *map(_small, launcher)], own, map(_small, unread))


_SHAPES = {"auto": "automatic", "static": "false", "dynamic": "true"}
"""What compile_shapes says, in the launcher's words."""


def _small(claim: Claim | None) -> Claim | None:
    return replace(claim, value=claim.value.lower()) if claim is not None else None


_RULES: tuple[Callable[[Sources, Start], Verdict], ...] = (
    _precision,
    _processes,
    _machines,
    _machine_rank,
    _main_address,
    _main_port,
    _device,
    _backend,
    _accumulation,
    _affinity,
    _threads,
)
