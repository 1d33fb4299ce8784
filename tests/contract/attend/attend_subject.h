// An implementation of attention as the conformance suite sees it: the CPU ones call Attend, one
// for another device uploads the host lanes, launches and copies back.
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

  // What AttendResult::implementation must say when this one has run.
  virtual std::string_view name() const = 0;

  // Where this machine or build cannot run it, its tests are skipped with the reason.
  virtual bool supported() const = 0;
  virtual std::string reason() const = 0;

  virtual ErrorBound bound(ElementType type) const = 0;

  // The same for tiles of any shape.
  virtual ErrorBound bound_of(const TileShape& shape) const {
    return bound(ElementsOf(shape.format));
  }

  // True where a query row has the same bits whatever other rows are computed with it.
  virtual bool rows_are_independent() const = 0;

  // False where a forked process cannot use what this one has opened, as with a GPU.
  virtual bool survives_fork() const { return true; }

  virtual AttendResult Run(const AttendBatch& batch, Executor& executor) = 0;

  // What Run would read of the items that have a selection rule.
  virtual AttendResult Choose(const AttendBatch& batch, Executor& executor,
                              SelectionSink& sink) = 0;
  // How far the value of a block, of logits of a few units, may be off.
  virtual double value_tolerance() const { return 0; }
};

}  // namespace tessera::kernels
