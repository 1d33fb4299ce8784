// Gives the library's own files access to the state behind a public handle.
#pragma once

#include <memory>

#include "client/sequence/sequence_state.h"
#include "tessera/sequence.h"

namespace tessera::client {

struct SequenceAccess {
  static const std::shared_ptr<SequenceState>& State(const Sequence& sequence) {
    return sequence.state_;
  }
  static const std::shared_ptr<Core>& CoreOf(const Sequence& sequence) { return sequence.core_; }
};

}  // namespace tessera::client
