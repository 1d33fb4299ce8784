#include "client/bench/workload/generated_kv.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "client/bench/workload/query_strength.h"
#include "daemon/base/check.h"

namespace tessera::cli::bench {

namespace {

using Vector = std::vector<float>;

// An independent random stream for each seed, stream and part.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream, std::uint64_t part)
      : sequence_{static_cast<std::uint32_t>(seed),   static_cast<std::uint32_t>(seed >> 32),
                  static_cast<std::uint32_t>(stream), static_cast<std::uint32_t>(stream >> 32),
                  static_cast<std::uint32_t>(part),   static_cast<std::uint32_t>(part >> 32)},
        engine_(sequence_) {}

  float Normal() { return normal_(engine_); }
  double Uniform(double low, double high) {
    return std::uniform_real_distribution<double>(low, high)(engine_);
  }
  std::uint32_t Below(std::uint32_t bound) {
    return std::uniform_int_distribution<std::uint32_t>(0, bound - 1)(engine_);
  }
  std::mt19937_64& engine() { return engine_; }

 private:
  std::seed_seq sequence_;
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

constexpr std::uint64_t kPlaces = 0;  // stream of positions; streams of heads follow
constexpr std::uint64_t kHeads = 1;
constexpr std::uint64_t kLayerStride = 7919;  // between the seeds of layers' heads

float Dot(const float* a, const float* b, std::size_t size) {
  constexpr std::size_t kSums = 16;  // head_dim is a multiple of it
  float sums[kSums] = {};
  for (std::size_t i = 0; i < size; i += kSums) {
    for (std::size_t j = 0; j < kSums; ++j) sums[j] += a[i + j] * b[i + j];
  }
  return std::accumulate(sums, sums + kSums, 0.0f);
}

void AddScaled(Vector& to, double factor, const Vector& what) {
  for (std::size_t i = 0; i < to.size(); ++i) to[i] += static_cast<float>(factor) * what[i];
}

void Normalise(Vector& vector) {
  const float length = std::sqrt(Dot(vector.data(), vector.data(), vector.size()));
  for (float& element : vector) element /= length;
}

// Gram-Schmidt: makes rows orthogonal, of length 1.
void Orthonormalise(std::vector<Vector>& rows) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    for (int round = 0; round < 2; ++round) {  // twice, against rounding
      for (std::size_t j = 0; j < i; ++j) {
        AddScaled(rows[i], -Dot(rows[i].data(), rows[j].data(), rows[i].size()), rows[j]);
      }
    }
    Normalise(rows[i]);
  }
}

std::vector<Vector> NormalRows(Random& random, std::size_t rows, std::size_t size) {
  std::vector<Vector> all(rows, Vector(size));
  for (Vector& row : all) {
    for (float& element : row) element = random.Normal();
  }
  return all;
}

// RoPE rotates elements i and i + head_dim / 2 together; the first planes rotate fastest.
class Rope {
 public:
  explicit Rope(const GeneratedShape& shape)
      : tokens_(shape.tokens), half_(shape.head_dim / 2), turns_(half_) {
    for (std::uint32_t i = 0; i < half_ && shape.rope_base > 0; ++i) {
      turns_[i] = std::pow(shape.rope_base, -static_cast<double>(i) / half_);
    }
  }

  std::uint32_t planes() const { return half_; }
  // 1 for channels whose plane hardly rotates within the context, `turning` for the others.
  Vector Emphasis(double turning) const {
    Vector emphasis(std::size_t{half_} * 2);
    for (std::uint32_t i = 0; i < half_; ++i) {
      const bool still = Wavelength(i) > 4.0 * tokens_ || i + 4 >= half_;
      emphasis[i] = emphasis[i + half_] = static_cast<float>(still ? 1 : turning);
    }
    return emphasis;
  }
  double Wavelength(std::uint32_t plane) const { return 2 * M_PI / turns_[plane]; }
  void Turn(Vector& row, std::uint64_t position) const {
    for (std::uint32_t i = 0; i < half_; ++i) {
      const double angle = static_cast<double>(position) * turns_[i];
      const auto cosine = static_cast<float>(std::cos(angle));
      const auto sine = static_cast<float>(std::sin(angle));
      const float low = row[i];
      const float high = row[i + half_];
      row[i] = low * cosine - high * sine;
      row[i + half_] = low * sine + high * cosine;
    }
  }

 private:
  std::uint32_t tokens_;
  std::uint32_t half_;
  std::vector<double> turns_;  // radians per token; 0 without RoPE
};

// Equal parts in a few planes with wavelengths from 16 tokens to twice the context. Zero if no
// plane rotates.
Vector RecencyDirection(Random& random, const Rope& rope, std::uint32_t tokens) {
  constexpr std::size_t kPlanes = 12;
  std::vector<std::uint32_t> turning;
  for (std::uint32_t i = 0; i < rope.planes(); ++i) {
    if (rope.Wavelength(i) >= 16 && rope.Wavelength(i) <= 2.0 * tokens) turning.push_back(i);
  }
  Vector vector(std::size_t{rope.planes()} * 2);
  for (std::size_t i = 0; i < kPlanes && !turning.empty(); ++i) {
    const std::uint32_t plane = turning[i * turning.size() / kPlanes];
    const double angle = random.Uniform(0, 2 * M_PI);
    vector[plane] = static_cast<float>(std::cos(angle));
    vector[plane + rope.planes()] = static_cast<float>(std::sin(angle));
  }
  if (!turning.empty()) Normalise(vector);
  return vector;
}

// Latent rows of all chunk types: one per topic and one per token.
class Vocabulary {
 public:
  Vocabulary(Random& random, const GeneratedShape& shape)
      : chunk_tokens_(shape.chunk_tokens),
        topics_(NormalRows(random, shape.chunk_types, shape.head_dim)),
        tokens_(
            NormalRows(random, std::size_t{shape.chunk_types} * chunk_tokens_, shape.head_dim)) {}

  // Unit variance in every element.
  void Draw(Random& random, std::uint32_t type, std::uint32_t token, Vector& latent) const {
    constexpr double kTopic = 0.3;  // shares of the variance; the rest is drawn per occurrence
    constexpr double kToken = 0.4;
    const Vector& topic = topics_[type];
    const Vector& own = tokens_[std::size_t{type} * chunk_tokens_ + token];
    for (std::size_t i = 0; i < latent.size(); ++i) {
      latent[i] = static_cast<float>(std::sqrt(kTopic)) * topic[i] +
                  static_cast<float>(std::sqrt(kToken)) * own[i] +
                  static_cast<float>(std::sqrt(1 - kTopic - kToken)) * random.Normal();
    }
  }

 private:
  std::uint32_t chunk_tokens_;
  std::vector<Vector> topics_;
  std::vector<Vector> tokens_;
};

// The directions of keys or values in each region, scaled by strength, strongest first.
class Mixing {
 public:
  // `emphasis`: weight of each channel in the strong directions.
  Mixing(Random& random, const GeneratedShape& shape, double exponent, const Vector& emphasis) {
    const std::vector<Vector> common = NormalRows(random, shape.head_dim, shape.head_dim);
    for (std::uint32_t region = 0; region < shape.regions; ++region) {
      std::vector<Vector> rows = NormalRows(random, shape.head_dim, shape.head_dim);
      const auto own = static_cast<float>(shape.regions == 1 ? 0 : shape.drift);
      for (std::size_t i = 0; i < rows.size(); ++i) {
        for (std::size_t c = 0; c < emphasis.size(); ++c) {
          rows[i][c] = emphasis[c] * (own * rows[i][c] + (1 - own) * common[i][c]);
        }
      }
      Orthonormalise(rows);
      Scale(rows,
            exponent * std::exp2(random.Uniform(-shape.exponent_spread, shape.exponent_spread)));
      regions_.push_back(std::move(rows));
    }
  }

  // Elements have a mean square of 1.
  Vector Mix(std::uint32_t region, const Vector& latent) const {
    return MixWith(regions_[region], latent);
  }
  const std::vector<Vector>& directions(std::uint32_t region) const { return regions_[region]; }

  static Vector MixWith(const std::vector<Vector>& directions, const Vector& latent) {
    Vector row(latent.size());
    for (std::size_t i = 0; i < latent.size(); ++i) AddScaled(row, latent[i], directions[i]);
    return row;
  }

 private:
  static void Scale(std::vector<Vector>& rows, double exponent) {
    std::vector<double> moments;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      moments.push_back(std::pow(static_cast<double>(i + 1), -exponent));
    }
    const double sum = std::accumulate(moments.begin(), moments.end(), 0.0);
    const auto size = static_cast<double>(rows.size());
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (float& x : rows[i]) x *= static_cast<float>(std::sqrt(moments[i] * size / sum));
    }
  }

  std::vector<std::vector<Vector>> regions_;
};

// Channels that are large in every key, in planes that rotate slowly.
Vector LargeChannels(Random& random, const GeneratedShape& shape) {
  const std::uint32_t planes = shape.head_dim / 2;
  Vector channels(shape.head_dim);
  for (std::uint32_t i = 0; i < shape.large_channels; ++i) {
    const std::uint32_t plane = planes - 1 - random.Below(planes / 4);
    channels[plane + random.Below(2) * planes] +=
        static_cast<float>(random.Below(2) == 0 ? -shape.large_size : shape.large_size);
  }
  return channels;
}

void AddOutliers(Random& random, const GeneratedShape& shape, Vector& row) {
  if (shape.outlier_rate == 0) return;
  std::bernoulli_distribution is_outlier(shape.outlier_rate);
  for (float& element : row) {
    if (!is_outlier(random.engine())) continue;
    element += static_cast<float>(random.Below(2) == 0 ? -shape.outlier_size : shape.outlier_size);
  }
}

// Keys or values of a head before planting and RoPE.
class Content {
 public:
  // `chunks`: the type of each chunk; must outlive the object.
  Content(Random& random, const GeneratedShape& shape, const std::vector<std::uint32_t>& chunks,
          double exponent, const Vector& emphasis)
      : shape_(shape),
        chunks_(chunks),
        words_(random, shape),
        mixing_(random, shape, exponent, emphasis),
        latent_(shape.head_dim) {}

  Vector Draw(Random& random, std::uint32_t token) {
    words_.Draw(random, chunks_[token / shape_.chunk_tokens], token % shape_.chunk_tokens, latent_);
    Vector row = mixing_.Mix(RegionOf(token), latent_);
    AddOutliers(random, shape_, row);
    return row;
  }
  const std::vector<Vector>& DirectionsAt(std::uint32_t token) const {
    return mixing_.directions(RegionOf(token));
  }

 private:
  std::uint32_t RegionOf(std::uint32_t token) const {
    return static_cast<std::uint32_t>(std::uint64_t{token} * shape_.regions / shape_.tokens);
  }

  const GeneratedShape& shape_;
  const std::vector<std::uint32_t>& chunks_;
  Vocabulary words_;
  Mixing mixing_;
  Vector latent_;
};

void Store(const Vector& row, std::vector<std::uint16_t>& to) {
  for (const float element : row) to.push_back(kernels::FloatToBf16(element));
}

std::vector<std::uint32_t> Run(std::uint32_t first, std::uint32_t count) {
  std::vector<std::uint32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

}  // namespace

GeneratedShape ContentOnly(GeneratedShape shape) {
  shape.exponent_spread = 0;
  shape.chunk_types = shape.tokens;
  shape.chunk_tokens = 1;
  shape.zipf_exponent = 0;
  shape.large_channels = 0;
  shape.outlier_rate = 0;
  shape.recency_size = 0;
  shape.sinks = 0;
  shape.heavy_hitters = 0;
  shape.needles = 0;
  shape.rope_base = 0;
  return shape;
}

GeneratedKv::GeneratedKv(const GeneratedShape& shape, std::uint64_t seed, std::uint32_t layer)
    : shape_(shape), seed_(seed), head_seed_(seed + kLayerStride * layer) {
  TESSERA_CHECK(
      kernels::IsHeadDim(shape.head_dim) && shape.regions > 0 &&
          shape.tokens >= shape.sinks + shape.recent +
                              2 * shape.needle_tokens * (shape.needles + shape.heavy_hitters),
      "the shape has room for all planted tokens");
  PlaceTokens();
  for (std::uint32_t head = 0; head < shape.kv_heads; ++head) heads_.push_back(MakeHead(head));
}

void GeneratedKv::PlaceTokens() {
  Random random(seed_, kPlaces, 0);
  std::vector<double> frequencies;
  for (std::uint32_t i = 1; i <= shape_.chunk_types; ++i)
    frequencies.push_back(std::pow(i, -shape_.zipf_exponent));
  std::discrete_distribution<std::uint32_t> zipf(frequencies.begin(), frequencies.end());
  for (std::uint32_t t = 0; t < shape_.tokens; t += shape_.chunk_tokens) {
    chunks_.push_back(zipf(random.engine()));
  }
  // One needle or heavy hitter per stretch of equal length, so that they do not overlap.
  const std::uint32_t first = shape_.sinks;
  const std::uint32_t last = shape_.tokens - shape_.recent;
  const std::uint32_t planted = shape_.needles + shape_.heavy_hitters;
  if (planted == 0) return;
  const std::uint32_t stretch = (last - first) / planted;
  std::vector<std::uint32_t> stretches(planted);
  std::iota(stretches.begin(), stretches.end(), 0);
  std::shuffle(stretches.begin(), stretches.end(), random.engine());
  for (std::uint32_t i = 0; i < planted; ++i) {
    const std::uint32_t place =
        first + stretches[i] * stretch + random.Below(stretch - shape_.needle_tokens);
    (i < shape_.needles ? needles_ : heavy_hitters_).push_back(place);
  }
  std::sort(needles_.begin(), needles_.end());
  std::sort(heavy_hitters_.begin(), heavy_hitters_.end());
}

GeneratedKv::Head GeneratedKv::MakeHead(std::uint32_t kv_head) const {
  Random random(head_seed_, kHeads + kv_head, 0);
  const Rope rope(shape_);
  Content keys(random, shape_, chunks_, shape_.key_exponent, rope.Emphasis(shape_.turning));
  Content values(random, shape_, chunks_, shape_.value_exponent, Vector(shape_.head_dim, 1));
  // A unit vector distributed like content at this token, restricted to channels that RoPE hardly
  // rotates and orthogonal to the previous ones.
  std::vector<Vector> directions;
  const auto direction_at = [&](std::uint32_t token) {
    const std::vector<Vector> latent = NormalRows(random, 1, shape_.head_dim);
    Vector direction = Mixing::MixWith(keys.DirectionsAt(token), latent.front());
    const Vector still = rope.Emphasis(0);
    for (std::size_t c = 0; c < still.size(); ++c) direction[c] *= still[c];
    directions.push_back(std::move(direction));
    Orthonormalise(directions);
    return directions.back();
  };
  Head head;
  head.content = keys.DirectionsAt(shape_.tokens - 1);
  head.sink = direction_at(shape_.tokens - 1);
  head.heavy = direction_at(shape_.tokens - 1);
  head.recency = RecencyDirection(random, rope, shape_.tokens);

  // About the length of a content row.
  const double whole = std::sqrt(static_cast<double>(shape_.head_dim));
  Vector common = LargeChannels(random, shape_);
  AddScaled(common, shape_.recency_size * whole, head.recency);
  std::vector<Vector> parts(shape_.tokens, common);
  const auto plant = [&](std::uint32_t token, double size, const Vector& direction) {
    AddScaled(parts[token], size * whole, direction);
  };
  for (std::uint32_t t = 0; t < shape_.sinks; ++t) plant(t, shape_.sink_size, head.sink);
  for (const std::uint32_t t : heavy_hitters_) plant(t, shape_.planted_size, head.heavy);
  for (const std::uint32_t first : needles_) {
    head.needles.push_back(direction_at(first));
    for (std::uint32_t i = 0; i < shape_.needle_tokens; ++i) {
      plant(first + i, shape_.planted_size, head.needles.back());
    }
  }

  for (std::uint32_t t = 0; t < shape_.tokens; ++t) {
    Vector key = keys.Draw(random, t);
    AddScaled(key, 1, parts[t]);
    rope.Turn(key, t);
    Store(key, head.keys);
    Vector value = values.Draw(random, t);
    if (t < shape_.sinks) {
      for (float& element : value) element *= 0.1f;
    }
    Store(value, head.values);
  }
  return head;
}

kernels::LaneRows GeneratedKv::Rows(std::uint32_t kv_head, std::uint64_t first,
                                    std::uint64_t count) const {
  TESSERA_CHECK(kv_head < shape_.kv_heads && first + count <= shape_.tokens, "rows in range");
  const auto span = [&](const std::vector<std::uint16_t>& rows) -> kernels::RowSpan {
    return {.data = reinterpret_cast<const std::byte*>(rows.data() + first * shape_.head_dim),
            .count = count,
            .head_dim = shape_.head_dim,
            .type = kernels::ElementType::kBf16};
  };
  return {.keys = span(heads_[kv_head].keys), .values = span(heads_[kv_head].values)};
}

// The tokens a query seeks and the direction that finds them; empty if the shape has none of the
// kind drawn.
GeneratedKv::Goal GeneratedKv::DrawGoal(const Head& head, std::uint32_t drawn,
                                        std::uint32_t needle) const {
  if (drawn == 0 && !needles_.empty()) {
    return {Seeks::kNeedle, Run(needles_[needle], shape_.needle_tokens), head.needles[needle]};
  }
  if (drawn == 1 && !heavy_hitters_.empty()) {
    return {Seeks::kHeavyHitters, heavy_hitters_, head.heavy};
  }
  if (drawn == 2 && shape_.recency_size > 0 && shape_.rope_base > 0) {
    return {Seeks::kRecent, Run(shape_.tokens - shape_.recent, shape_.recent), head.recency};
  }
  return {};
}

std::vector<double> GeneratedKv::Logits(const Head& head, const std::vector<float>& query) const {
  const double scale = 1 / std::sqrt(static_cast<double>(shape_.head_dim));
  std::vector<double> logits;
  Vector key(shape_.head_dim);
  const std::uint16_t* from = head.keys.data();
  for (std::uint32_t t = 0; t < shape_.tokens; ++t) {
    for (float& element : key) element = kernels::Bf16ToFloat(*from++);
    logits.push_back(scale * double{Dot(query.data(), key.data(), key.size())});
  }
  return logits;
}

GeneratedQuery GeneratedKv::Query(std::uint32_t kv_head, std::uint32_t head,
                                  std::uint64_t index) const {
  const Head& from = heads_[kv_head];
  Random random(head_seed_, kHeads + kv_head, 1 + index * shape_.group + head);
  const Rope rope(shape_);
  const std::uint32_t drawn = random.Below(4);
  Goal goal = DrawGoal(from, drawn, random.Below(std::max(shape_.needles, 1u)));
  // Mostly along the directions of keys, scaled so that logits have a standard deviation of
  // about 1.
  Vector row = Mixing::MixWith(from.content, NormalRows(random, 1, shape_.head_dim).front());
  double squares = 0;
  for (const Vector& direction : from.content) {
    const double moment = Dot(direction.data(), direction.data(), direction.size());
    squares += moment * moment;
  }
  for (float& element : row) element *= static_cast<float>(std::sqrt(shape_.head_dim / squares));

  const std::uint64_t position = shape_.tokens - 1;
  rope.Turn(row, position);
  std::vector<Vector> directions;
  std::vector<QueryPart> parts;
  const auto look_for = [&](Vector direction, std::vector<std::uint32_t> tokens, double mass) {
    rope.Turn(direction, position);
    parts.push_back({.logits = Logits(from, direction), .sought = std::move(tokens), .mass = mass});
    directions.push_back(std::move(direction));
  };
  if (shape_.sinks > 0) look_for(from.sink, Run(0, shape_.sinks), shape_.sink_mass);
  if (!goal.tokens.empty()) look_for(goal.direction, goal.tokens, shape_.sought_mass);
  FindStrengths(Logits(from, row), parts);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    AddScaled(row, parts[i].strength, directions[i]);
  }
  GeneratedQuery query = {.seeks = goal.seeks, .sought = std::move(goal.tokens)};
  Store(row, query.row);
  return query;
}

}  // namespace tessera::cli::bench
