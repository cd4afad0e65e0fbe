"""What a forked child of the tests runs: it unpickles something, to be seen doing so."""

import pickle


def main():
    pickle.loads(pickle.dumps([1]))
