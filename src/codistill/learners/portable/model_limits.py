"""How much a received model may compute and hold, found before it runs for the first time.

An operation stands for a tenth of a nanosecond of one processor of 2024, rounded up: a multiplication with an addition
in a product of matrices counts 2, the sine of a number 100. What counts how much was measured, and is coarse: the
limits are far above honest models, and far below what would stop a receiver. They do not depend on the machine, so a
model is refused everywhere or nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW_OPERATIONS = 20_000_000_000  # per row: about a second. A ResNet-34 for images of 32 x 32 has 2,600,000,000
CALL_OPERATIONS = 20_000_000_000_000  # for all rows of the receiver: about a quarter of an hour
MEMORY = 1 << 30  # bytes of intermediate results
BLOCK = 1 << 22  # numbers in one block of intermediate results, where rows are predicted in blocks


@dataclass(frozen=True)
class Cost:
    """What predictions for some rows take."""

    rows: int
    operations: int
    memory: int = 0  # bytes of intermediate results that are held at a time

    def check(self) -> None:
        """Raise ValueError, with the figure and the limit, if a model computes or holds too much."""
        per_row = self.operations // max(self.rows, 1)
        if per_row > ROW_OPERATIONS:
            raise ValueError(f"a model of {per_row:,} operations per row, above the limit of {ROW_OPERATIONS:,}")
        if self.operations > CALL_OPERATIONS:
            raise ValueError(f"a model of {self.operations:,} operations in all, above {CALL_OPERATIONS:,}")
        if self.memory > MEMORY:
            raise ValueError(f"a model that holds {self.memory:,} bytes for {self.rows} rows, above {MEMORY:,}")

    def is_within_limits(self) -> bool:
        """Whether `check` passes."""
        try:
            self.check()
        except ValueError:
            return False
        return True
