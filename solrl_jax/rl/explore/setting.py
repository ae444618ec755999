"""`ExplorationSetting`: the format, steps and options that candidates are explored with."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ExplorationSetting:
    """How candidates are explored.

    Settings are hashable and compared by their fields.

    Attributes:
        precision: The name of a format, a key of `quant.formats.FORMATS`, such as "nvfp4". Never
            "auto".
        steps: The number of solver steps, at least 1.
        option_set: The name of a set of exploration options, a file in `configs/explore/` without
            its ending, such as "best". "" stands for the options of the run.
    """

    precision: str
    steps: int
    option_set: str = ""

    @property
    def name(self) -> str:
        """The setting in a few words for messages and tables, e.g. "nvfp4, 6 steps", or with
        the name of its options "best: nvfp4, 6 steps".
        """
        option_set = f"{self.option_set}: " if self.option_set else ""
        return f"{option_set}{self.precision}, {self.steps} steps"
