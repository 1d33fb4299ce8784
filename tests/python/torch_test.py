"""torch tensors on the CPU: used in place, with any strides, beside torch's own attention."""

import sys
import unittest

from support import WithDaemon, cases, main, tk

try:
    import torch
except ImportError as error:
    print(f"skipped: {error}", file=sys.stderr)
    sys.exit(cases.SKIPPED)


class Torch(WithDaemon):
    def test_a_prompt_in_two_chunks_and_decode_against_torch(self):
        torch.manual_seed(self.seed)
        worker = self.attach(threads=2)
        for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-4)):
            kind = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
            model = self.model(worker, name=kind, dtype=kind)
            sequence = worker.sequence(model)
            # As a model has them: [batch, heads, tokens, dim], slices of one qkv tensor.
            tokens = 70
            qkv = torch.randn(1, tokens, self.QUERY_HEADS + 2 * self.KV_HEADS, self.DIM).to(dtype)
            query, key, value = (part.transpose(1, 2) for part in qkv.split(
                [self.QUERY_HEADS, self.KV_HEADS, self.KV_HEADS], 2))

            def rows(tensor, part):
                view = tensor[:, :, part].transpose(1, 2)
                self.assertEqual(view.data_ptr(), tensor[:, :, part].data_ptr())
                return view

            wanted = torch.nn.functional.scaled_dot_product_attention(
                query.float(), key.float().repeat_interleave(2, 1),
                value.float().repeat_interleave(2, 1), is_causal=True).transpose(1, 2)
            first = slice(0, 40)
            for layer in range(self.LAYERS):
                sequence.append(rows(key, first), rows(value, first), layer=layer)
            for token in range(40, tokens):
                now = slice(token, token + 1)
                out = torch.empty(1, 1, self.QUERY_HEADS, self.DIM, dtype=dtype)
                with worker.step([sequence]) as step:
                    for layer in range(self.LAYERS):
                        got = step.attend(layer, rows(query, now), rows(key, now),
                                          rows(value, now), out=out)
                self.assertIs(got, out)
                torch.testing.assert_close(out.float(), wanted[:, now], atol=tolerance, rtol=0.02)
            with worker.read([sequence]) as read:
                whole = read.attend(0, rows(query, slice(0, tokens)))
            self.assertEqual((whole.dtype, whole.shape[0]), (dtype, tokens))
            torch.testing.assert_close(whole.float()[None], wanted, atol=tolerance, rtol=0.02)

    def test_a_tensor_that_moves_is_looked_at_again(self):
        worker = self.attach()
        sequence = worker.sequence(self.model(worker))
        key = torch.ones(1, self.KV_HEADS, self.DIM, dtype=torch.bfloat16)
        query = torch.ones(1, self.QUERY_HEADS, self.DIM, dtype=torch.bfloat16)
        out = torch.zeros(1, self.QUERY_HEADS, self.DIM)
        for turn in range(3):
            if turn == 1:
                old = out.data
                out.set_(torch.full_like(out, 5.0))
                old.fill_(7.0)
            with worker.step([sequence]) as step:
                for layer in range(self.LAYERS):
                    step.attend(layer, query, key, key, out=out)
            torch.testing.assert_close(out, torch.ones_like(out))
        self.assertTrue((old == 7).all())

    def test_what_torch_cannot_express(self):
        worker = self.attach()
        sequence = worker.sequence(self.model(worker))
        sequence.append(*self.prompt(10))
        with worker.read([sequence]) as read:
            query = torch.ones(1, 1, self.DIM, dtype=torch.bfloat16)
            with self.assertRaises(tk.LayoutError):
                read.attend(0, query.expand(1, self.QUERY_HEADS, self.DIM))
            with self.assertRaisesRegex(tk.InvalidArgument, "torch.float64; expected is bf16"):
                read.attend(0, torch.ones(1, self.QUERY_HEADS, self.DIM, dtype=torch.float64))


if __name__ == "__main__":
    main()
