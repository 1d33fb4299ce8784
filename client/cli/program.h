// The program `tessera`, for its main function and for the library in the Python wheel.
#pragma once

namespace tessera::cli {

// Returns the exit status. Call it once.
int RunProgram(int argc, char** argv);

}  // namespace tessera::cli
