/* The smallest worker in C: attach, prefill a prompt in bulk, decode a few tokens, and check
 * attention against a softmax of our own.   Usage: c_minimal [ADDRESS] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "tessera/tessera.h"

enum { kLayers = 2, kQueryHeads = 8, kKvHeads = 2, kDim = 64, kPrompt = 100, kDecoded = 16 };
enum { kRow = kKvHeads * kDim, kQueryRow = kQueryHeads * kDim };

static tessera_error error;

static void Must(tessera_code code) {
  if (code == TESSERA_OK) return;
  fprintf(stderr, "error %d: %s\n", (int)code, error.message);
  exit(1);
}

static void FillRandom(float* rows, size_t count) {
  for (size_t i = 0; i < count; ++i) rows[i] = 4.0f * (float)rand() / (float)RAND_MAX - 2.0f;
}

/* Channel 0 of what query head 0 attends to: keys and values are [token][kv head][channel]. */
static double LocalAttention(const float* query, const float* keys, const float* values,
                             int tokens) {
  double sum = 0, weights = 0;
  for (int t = 0; t < tokens; ++t) {
    double dot = 0;
    for (int c = 0; c < kDim; ++c) dot += (double)query[c] * keys[t * kRow + c];
    const double weight = exp(dot / sqrt(kDim));
    weights += weight;
    sum += weight * values[t * kRow];
  }
  return sum / weights;
}

int main(int argc, char** argv) {
  static float keys[(kPrompt + kDecoded) * kRow], values[(kPrompt + kDecoded) * kRow];
  float query[kQueryRow], output[kQueryRow];
  tessera_attach_options attach = TESSERA_ATTACH_OPTIONS_INIT;
  tessera_model_options options = TESSERA_MODEL_OPTIONS_INIT;
  tessera_layer layers[kLayers] = {TESSERA_LAYER_INIT, TESSERA_LAYER_INIT};
  tessera_worker* worker = NULL;
  tessera_model* model = NULL;
  tessera_sequence* sequence = NULL;
  double worst = 0;

  attach.address = argc > 1 ? argv[1] : NULL;
  Must(tessera_attach(&attach, &worker, &error));
  for (int l = 0; l < kLayers; ++l) {
    layers[l].query_heads = kQueryHeads;
    layers[l].kv_heads = kKvHeads;
    layers[l].head_dim = kDim;
  }
  options.name = "tiny";
  options.type = TESSERA_FP32;
  options.layers = layers;
  options.layer_count = kLayers;
  Must(tessera_register_model(worker, &options, &model, &error));
  Must(tessera_sequence_create(worker, model, NULL, &sequence, &error));

  FillRandom(keys, (kPrompt + kDecoded) * kRow);
  FillRandom(values, (kPrompt + kDecoded) * kRow);
  for (int l = 0; l < kLayers; ++l) { /* both layers hold the same rows here */
    tessera_append append = TESSERA_APPEND_INIT;
    append.key = keys;
    append.value = values;
    append.bytes = sizeof(float) * kPrompt * kRow;
    append.tokens = kPrompt;
    append.first_layer = (uint32_t)l;
    append.layers = 1;
    Must(tessera_sequence_append(sequence, &append, NULL, &error));
  }

  for (int i = 0; i < kDecoded; ++i) {
    tessera_step_tensors tensors = TESSERA_STEP_TENSORS_INIT;
    tessera_code code;
    FillRandom(query, kQueryRow);
    tensors.key = keys + (kPrompt + i) * kRow;
    tensors.value = values + (kPrompt + i) * kRow;
    tensors.key_bytes = sizeof(float) * kRow;
    tensors.query = query;
    tensors.query_bytes = sizeof query;
    tensors.output = output;
    tensors.output_bytes = sizeof output;
    do { /* TESSERA_ABORTED: nothing was committed, do the step again */
      tessera_step* step = NULL;
      Must(tessera_step_begin(worker, &sequence, 1, NULL, &step, &error));
      for (uint32_t l = 0; l < kLayers; ++l) {
        (void)tessera_step_append_and_attend(step, l, &tensors, &error);
      }
      code = tessera_step_end(step, NULL, 0, &error); /* repeats the error of a call before it */
      tessera_step_destroy(step);
    } while (code == TESSERA_ABORTED);
    Must(code);
    const double own = LocalAttention(query, keys, values, kPrompt + i + 1);
    printf("token %d: attention %9.6f, own softmax %9.6f\n", (int)tessera_sequence_tokens(sequence),
           output[0], own);
    if (fabs(output[0] - own) > worst) worst = fabs(output[0] - own);
  }
  tessera_sequence_destroy(sequence);
  tessera_model_destroy(model);
  tessera_detach(worker);
  if (worst > 1e-5) fprintf(stderr, "they differ\n");
  return worst > 1e-5;
}
