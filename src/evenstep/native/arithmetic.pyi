"""Types of the arithmetic that does not depend on the processor (product.h and redirect.h); addresses are integers."""

def bits() -> int: ...
def limit_bits(most: int, /) -> None: ...
def product(
    wide: bool,
    m: int,
    n: int,
    k: int,
    alpha: float,
    a: int,
    a_row: int,
    a_column: int,
    b: int,
    b_row: int,
    b_column: int,
    beta: float,
    c: int,
    c_row: int,
    c_column: int,
    /,
) -> None: ...
def redirect(library: str, /) -> list[str]: ...
def restore() -> None: ...
