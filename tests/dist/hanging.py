"""launch/train.py with a fault: rank 1 never comes back from reading the window of step 3. Used by test_guard.py."""

import os
import sys
import time

from scripts import load_script


def main() -> int:
    from tonnage.runtime.logs import quiet_libraries

    quiet_libraries()
    train = load_script("launch/train")
    train.__file__ = __file__  # what the ranks are started with
    from tonnage.train.source import PreparedSource

    whole = PreparedSource.next

    def next_window(self, cursor):
        if os.environ.get("RANK") == "1" and cursor.window == 2:
            time.sleep(600)
        return whole(self, cursor)

    PreparedSource.next = next_window
    return train.guarded(lambda: train.main(sys.argv[1:]), quiet=os.environ.get("RANK", "0") != "0")


if __name__ == "__main__":
    sys.exit(main())
