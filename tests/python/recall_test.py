"""A real (toy) language model, in numpy, answers through the Python client as it should."""

import json
import unittest

from recall_model import FOLDER, Recall
from support import WithDaemon, main, np

GOLDEN = json.loads((FOLDER / "golden.json").read_text())["prompts"]
SAMPLES = json.loads((FOLDER / "samples.json").read_text())["samples"]


class RecallModel(WithDaemon):
    def test_golden_answers_and_logits(self):
        for mapped in (True, False):
            model = Recall(self.attach(map_memory=mapped, threads=2))
            for prompt in GOLDEN:
                sequence = model.worker.sequence(model.model)
                answer, logits = model.generate(sequence, prompt["ids"], len(prompt["answer"]))
                self.assertEqual(answer, prompt["answer"])
                wanted = np.array(prompt["logits"])
                # The golden model keeps K and V in float32; a bf16 row has 8 bits.
                self.assertLess(np.abs(logits - wanted).max(), 0.15)

    def test_policies_answer_as_well_as_their_sizes_allow(self):
        model = Recall(self.attach(threads=2))
        right = {}
        for policy in ("", "mosaickv:keep=0.5,select=0,min_segment=32,recent=16", "quest",
                       "snapkv:budget=0.5,window=16", "chunkkv:budget=0.5",
                       "streaming:sink=4,recent=24"):
            right[policy] = 0
            for sample in SAMPLES:
                with model.worker.sequence(model.model, policy=policy) as sequence:
                    answer, _ = model.generate(sequence, sample["prompt"], len(sample["answer"]))
                right[policy] += answer == sample["answer"]
        print({policy or "dense": count for policy, count in right.items()})
        self.assertGreaterEqual(right[""], len(SAMPLES) - 2)  # README of the model: up to 99.6 %
        self.assertGreaterEqual(right["quest"], right[""] - 1)
        # A window of 28 tokens has lost what was asked for: the test can tell.
        self.assertLess(right["streaming:sink=4,recent=24"], right[""] - 2)


if __name__ == "__main__":
    main()
