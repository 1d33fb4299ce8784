// The interface between an implementation of attention and the conformance suite. CPU subjects call
// Attend directly; a device subject uploads the host lanes, launches, and copies results back.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "kernels/dispatch/attend.h"
#include "kernels/format/error_bound.h"
#include "kernels/format/tile_shape.h"

namespace tessera::kernels {

class AttendSubject {
 public:
  virtual ~AttendSubject() = default;

  // The expected AttendResult::implementation.
  virtual std::string_view name() const = 0;

  // Tests of an unsupported subject are skipped with the reason.
  virtual bool supported() const = 0;
  virtual std::string reason() const = 0;

  virtual ErrorBound bound(ElementType type) const = 0;

  // Error bound for segments of this shape.
  virtual ErrorBound bound_of(const TileShape& shape) const {
    return bound(ElementsOf(shape.format));
  }

  // True if the bits of a query row do not depend on the other rows of the call.
  virtual bool rows_are_independent() const = 0;

  // False if a forked process cannot use what this one has opened, as with a GPU.
  virtual bool survives_fork() const { return true; }

  // Rounds of a test over random cases, where a subject at full speed runs `usual`. Seeds differ
  // from run to run.
  virtual int rounds(int usual) const { return usual; }

  virtual AttendResult Run(const AttendBatch& batch, Executor& executor) = 0;

  // Runs only the selection, for items with a selection rule.
  virtual AttendResult Choose(const AttendBatch& batch, Executor& executor,
                              SelectionSink& sink) = 0;
  // The maximum error of a block's value, for logits of a few units.
  virtual double value_tolerance() const { return 0; }
};

}  // namespace tessera::kernels
