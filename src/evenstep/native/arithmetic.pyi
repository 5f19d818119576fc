"""Types of the arithmetic of every processor (product.h, caches.h and redirect.h); addresses are integers."""

def bits() -> int: ...
def limit_bits(most: int, /) -> None: ...
def pin_caches(library: str, /) -> tuple[int, int, int]: ...
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
