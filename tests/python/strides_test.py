"""Strides, fuzzed: rows of random layouts give what the same rows give when they are dense."""

import unittest

from support import WithDaemon, attention, from_bf16, main, np, tk


class Strides(WithDaemon):
    def spread(self, rows):
        """The same rows as a view with random gaps, an order of axes, and directions of them."""
        axes = list(self.random.permutation(rows.ndim - 1)) + [rows.ndim - 1]
        if rows.ndim == 4 and self.random.integers(2):
            axes = [0, 2, 1, 3]  # as Hugging Face has them: heads before tokens
        steps = [int(self.random.integers(1, 4)) for _ in axes[:-1]] + [1]
        shape = [rows.shape[axis] * step for axis, step in zip(axes, steps)]
        shape[-1] += int(self.random.integers(0, 9))
        memory = np.full(shape, 0x7FC0, np.uint16)  # gaps are not numbers
        view = memory[tuple(slice(None, rows.shape[axis] * step, step)
                            for axis, step in zip(axes, steps))]
        view = view.transpose(np.argsort(axes))
        if self.random.integers(3) == 0:
            view = view[::-1]
        view[...] = rows
        return view, memory

    def layer_rows(self, tokens, heads):
        return self.rows(tokens, heads, self.DIM)

    def test_random_layouts_of_everything(self):
        for mapped in (True, False):
            worker = self.attach(map_memory=mapped)
            model = self.model(worker)
            for round_ in range(15 if mapped else 4):
                with self.subTest(mapped=mapped, round=round_):
                    self.one_round(worker, model)

    def one_round(self, worker, model):
        tokens = int(self.random.integers(1, 90))
        key, value = self.prompt(tokens)
        sequence = worker.sequence(model)
        if self.random.integers(2):
            sequence.append(self.spread(key)[0], self.spread(value)[0])
        else:
            for layer in range(self.LAYERS):
                sequence.append(self.spread(key[layer])[0], self.spread(value[layer])[0],
                                layer=layer)
        new = int(self.random.integers(1, 5))
        new_key, new_value = self.prompt(new)
        query = self.rows(self.LAYERS, new, self.QUERY_HEADS, self.DIM)
        with worker.step([sequence], new_tokens=new) as step:
            outs = []
            for layer in range(self.LAYERS):
                out, memory = self.spread(np.zeros((new, self.QUERY_HEADS, self.DIM), np.uint16))
                gaps = (memory == 0x7FC0).sum()
                step.attend(layer, self.spread(query[layer])[0], self.spread(new_key[layer])[0],
                            self.spread(new_value[layer])[0], out=out)
                self.assertEqual((memory == 0x7FC0).sum(), gaps, "gaps are not written")
                outs.append(out)
        for layer, out in enumerate(outs):
            wanted, _ = attention(from_bf16(query[layer]),
                                  from_bf16(np.concatenate([key[layer], new_key[layer]])),
                                  from_bf16(np.concatenate([value[layer], new_value[layer]])))
            np.testing.assert_allclose(from_bf16(out), wanted, atol=0.02, rtol=0.01)
        dense = worker.attend_rpc([sequence], 1, query[1])
        with worker.read([sequence]) as read:
            np.testing.assert_array_equal(read.attend(1, self.spread(query[1])[0]), dense)
        sequence.close()

    def test_batches_are_rows_if_strides_can_say_so(self):
        worker = self.attach()
        model = self.model(worker)
        pair = [worker.sequence(model) for _ in range(2)]
        for sequence in pair:
            sequence.append(*self.prompt(40))
        # [batch, heads, tokens, dim], as transformers passes it; one token each.
        query = self.rows(2, self.QUERY_HEADS, 1, self.DIM).transpose(0, 2, 1, 3)
        with worker.read(pair) as read:
            out = read.attend(0, query)
            np.testing.assert_array_equal(out, read.attend(0, query.copy()))
            two = self.rows(2, self.QUERY_HEADS, 2, self.DIM).transpose(0, 2, 1, 3)
            with self.assertRaisesRegex(tk.LayoutError, "do not follow each other"):
                read.attend(0, two)


if __name__ == "__main__":
    main()
