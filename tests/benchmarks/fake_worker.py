"""What the fake workers of the A/B scripts' tests share: they do, on one rank, what the test wished for."""

import json
import os
import sys
import time

from harness import serve

wish = json.loads(sys.argv[1])


class FakeWorker:
    def start(self, family, rank, ranks, local_rank, port, timeout_s):
        self.family, self.rank, self.calls = family, rank, 0
        assert "TORCHELASTIC_RUN_ID" not in os.environ

    def do(self, step, arm):
        if wish.get("hang") == [self.rank, step, arm]:
            time.sleep(60)
        if wish.get("die") == [self.rank, step, arm]:
            os._exit(7)

    def wrong(self, arm):
        return wish.get("wrong") == [self.rank, arm] and self.calls > wish.get("after", 0)

    def finite(self, arm):
        return wish.get("poisoned") != [self.rank, arm]

    def close(self):
        return None


def work(handler):
    serve(handler, int(sys.argv[-1]))
