/* The C interface, as a C compiler sees it. */
#include <string.h>

#include "tessera/tessera.h"

/* Attaches to an address that no daemon serves. Returns the code; `error` receives the message. */
tessera_code AttachFromC(const char* address, tessera_error* error) {
  tessera_attach_options options = TESSERA_ATTACH_OPTIONS_INIT;
  tessera_worker* worker = NULL;
  tessera_code code;
  options.address = address;
  options.worker_name = "c";
  options.attach_timeout_ms = 2000;
  code = tessera_attach(&options, &worker, error);
  tessera_detach(worker);
  return code;
}

/* Every struct has an initializer that names its own size. */
int InitializersAreRight(void) {
  const tessera_attach_options attach = TESSERA_ATTACH_OPTIONS_INIT;
  const tessera_model_options model = TESSERA_MODEL_OPTIONS_INIT;
  const tessera_append append = TESSERA_APPEND_INIT;
  const tessera_layer layer = TESSERA_LAYER_INIT;
  const tessera_observation observation = TESSERA_OBSERVATION_INIT;
  const tessera_step_options step = TESSERA_STEP_OPTIONS_INIT;
  const tessera_step_tensors tensors = TESSERA_STEP_TENSORS_INIT;
  const tessera_read_options read = TESSERA_READ_OPTIONS_INIT;
  const tessera_read_tensors queries = TESSERA_READ_TENSORS_INIT;
  const tessera_selection selection = TESSERA_SELECTION_INIT;
  const tessera_lane_rows rows = TESSERA_LANE_ROWS_INIT;
  const tessera_event event = TESSERA_EVENT_INIT;
  return attach.struct_size == sizeof attach && attach.map_memory == 1 &&
         attach.reattach_timeout_ms == 60000 && model.struct_size == sizeof model &&
         layer.struct_size == sizeof layer && layer.query_heads == 0 && layer.sinks == NULL && model.type == TESSERA_BF16 &&
         rows.struct_size == sizeof rows && rows.type == TESSERA_FP32 && rows.tokens == 0 &&
         append.struct_size == sizeof append && observation.struct_size == sizeof observation &&
         step.struct_size == sizeof step && step.new_tokens == 1 && step.timeout_ms == 1000 &&
         tensors.struct_size == sizeof tensors && tensors.output_type == TESSERA_FP32 &&
         tensors.causal == 1 && tensors.selection == NULL &&
         tensors.output_strides.head == 0 && read.struct_size == sizeof read &&
         read.timeout_ms == 1000 && queries.struct_size == sizeof queries &&
         queries.queries == 1 && queries.causal == 1 && queries.output_type == TESSERA_FP32 &&
         selection.struct_size == sizeof selection && selection.rate == 1 &&
         event.struct_size == sizeof event && event.kind == TESSERA_EVENT_NONE;
}

int VersionsAgree(void) {
  return tessera_abi_version() == TESSERA_ABI_VERSION && strlen(tessera_version()) >= 5;
}
