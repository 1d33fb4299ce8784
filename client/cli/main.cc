// tessera: the command line for operators and engineers.

#include "client/cli/program.h"

int main(int argc, char** argv) { return tessera::cli::RunProgram(argc, argv); }
