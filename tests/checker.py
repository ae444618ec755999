"""The type checker of the tests: beartype, with an int where a float is asked for, as PEP 484 has it."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
