#include "tessera/model.h"

#include "client/session/bound_model.h"

namespace tessera::client {

const ModelGeometry& Model::geometry() const {
  static const ModelGeometry none;
  return record_ == nullptr ? none : record_->geometry;
}

ModelId Model::id() const { return record_ == nullptr ? ModelId() : record_->bound()->id(); }

}  // namespace tessera::client
