// The command `tessera` of the wheel: a function of its library, so that the code exists once.

#include "client/cli/program.h"

extern "C" __attribute__((visibility("default"))) int tessera_command(int argc, char** argv) {
  return tessera::cli::RunProgram(argc, argv);
}
