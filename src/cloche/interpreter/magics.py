"""stub until merge"""


class UsageError(Exception):
    pass


class Magics:
    def __init__(self, session):
        self.session = session


def rewrite(source, lineno):
    return None


def cell_magic(source):
    return None
