"""Whether all workers of a launch can be on the device at once: they wait for each other, so they must be."""

from __future__ import annotations

from dataclasses import dataclass

from tileweave import knobs
from tileweave.errors import ConfigError


@dataclass(frozen=True)
class Occupancy:
    """What a device holds of a kernel: its name, workers that one SM holds at once, SMs, and most SMs to use."""

    kernel: str
    workers_per_sm: int
    num_sms: int
    most_sms: int | None = None

    @property
    def fits(self) -> int:
        """Workers that can be resident. Under a limit of SMs one each, as the device spreads them over free SMs."""
        if self.most_sms is not None:
            return min(self.most_sms, self.num_sms) if self.workers_per_sm else 0
        return self.workers_per_sm * self.num_sms


def sms_to_use(num_sms: int) -> int:
    """SMs of a device that one launch may take, by the knob TILEWEAVE_GPU_SMS."""
    return min(num_sms, knobs.gpu_sms.get() or num_sms)


def check_resident(occupancy: Occupancy, workers: int, ranks: int) -> None:
    """Refuse a launch of `ranks` ranks with `workers` each that does not fit.

    Raises:
        ConfigError: with what was asked, what fits and what to set.
    """
    asked, fits = workers * ranks, occupancy.fits
    if asked <= fits:
        return
    name = occupancy.kernel
    if fits < ranks:
        advice = "use smaller tiles, or fewer virtual ranks" if ranks > 1 else "use smaller tiles or fewer stages"
    else:
        advice = f"set Config(workers={fits // ranks})"
    limit = "" if occupancy.most_sms is None else f", of which TILEWEAVE_GPU_SMS={occupancy.most_sms} may be used"
    raise ConfigError(
        f"kernel '{name}' asks for {asked} workers at once ({ranks} rank{'' if ranks == 1 else 's'} x {workers}), but "
        f"{fits} fit the GPU ({occupancy.workers_per_sm} an SM, {occupancy.num_sms} SMs{limit}), and workers that are "
        f"not resident would never answer those that wait for them; {advice}"
    )
