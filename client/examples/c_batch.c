/* Decodes a batch of two sequences with draft tokens: one accepts all of its drafts, its fork one.
 * The value of the token at position p is p, and queries are zeros, which attend to all tokens
 * alike: attention is the mean of the positions.   Usage: c_batch [ADDRESS] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tessera/tessera.h"

enum { kDim = 64, kPrompt = 100, kDrafts = 3 };

static tessera_error error;

static void Must(tessera_code code) {
  if (code == TESSERA_OK) return;
  fprintf(stderr, "error %d, cause %u: %s\n", (int)code, (unsigned)error.cause, error.message);
  exit(1);
}

static void Fill(float* row, float value) {
  for (int c = 0; c < kDim; ++c) row[c] = value;
}

int main(int argc, char** argv) {
  static float keys[kPrompt * kDim], values[kPrompt * kDim];
  static float key[2 * kDrafts * kDim], value[2 * kDrafts * kDim]; /* [batch][drafts][dim] */
  static float query[2 * kDrafts * kDim], output[2 * kDrafts * kDim];
  const uint32_t accepted[2] = {kDrafts, 1};
  tessera_attach_options attach = TESSERA_ATTACH_OPTIONS_INIT;
  tessera_model_options options = TESSERA_MODEL_OPTIONS_INIT;
  tessera_layer layer = TESSERA_LAYER_INIT;
  tessera_append prompt = TESSERA_APPEND_INIT;
  tessera_step_options step_options = TESSERA_STEP_OPTIONS_INIT;
  tessera_step_tensors tensors = TESSERA_STEP_TENSORS_INIT;
  tessera_worker* worker = NULL;
  tessera_model* model = NULL;
  tessera_sequence* batch[2] = {NULL, NULL};
  tessera_code code;
  int good = 1;

  attach.address = argc > 1 ? argv[1] : NULL;
  Must(tessera_attach(&attach, &worker, &error));
  layer.query_heads = layer.kv_heads = 1;
  layer.head_dim = kDim;
  options.name = "c_batch";
  options.type = TESSERA_FP32;
  options.layers = &layer;
  options.layer_count = 1;
  Must(tessera_register_model(worker, &options, &model, &error));
  Must(tessera_sequence_create(worker, model, NULL, &batch[0], &error));
  for (int p = 0; p < kPrompt; ++p) Fill(values + p * kDim, (float)p);
  prompt.key = keys;
  prompt.value = values;
  prompt.bytes = sizeof keys;
  prompt.tokens = kPrompt;
  Must(tessera_sequence_append(batch[0], &prompt, NULL, &error));
  Must(tessera_sequence_fork(batch[0], &batch[1], &error));

  for (int i = 0; i < 2 * kDrafts; ++i) Fill(value + i * kDim, (float)(kPrompt + i % kDrafts));
  tensors.key = key;
  tensors.value = value;
  tensors.key_bytes = sizeof key;
  tensors.query = query;
  tensors.query_bytes = sizeof query;
  tensors.output = output;
  tensors.output_bytes = sizeof output;
  step_options.new_tokens = kDrafts;
  do { /* TESSERA_ABORTED: nothing was committed, repeat the step */
    tessera_step* step = NULL;
    Must(tessera_step_begin(worker, batch, 2, &step_options, &step, &error));
    (void)tessera_step_append_and_attend(step, 0, &tensors, &error);
    code = tessera_step_end(step, accepted, 2, &error);
    tessera_step_destroy(step);
  } while (code == TESSERA_ABORTED);
  Must(code);

  for (int s = 0; s < 2; ++s) {
    const int tokens = (int)tessera_sequence_tokens(batch[s]);
    const float last = output[(s * kDrafts + (int)accepted[s] - 1) * kDim];
    printf("sequence %d: %d tokens, attention %.3f, mean %.3f\n", s, tokens, last,
           (tokens - 1) / 2.0);
    good = good && tokens == kPrompt + (int)accepted[s] && fabs(last - (tokens - 1) / 2.0) < 1e-3;
    tessera_sequence_destroy(batch[s]);
  }
  tessera_model_destroy(model);
  tessera_detach(worker);
  return good ? 0 : 1;
}
