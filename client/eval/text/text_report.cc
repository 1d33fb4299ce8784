#include "client/eval/text/text_report.h"

#include <cmath>
#include <iterator>

#include "client/eval/chart.h"
#include "client/eval/page_style.h"
#include "client/tools/table.h"
#include "daemon/base/strings.h"

namespace tessera::cli::eval {

namespace {

// "+0.0123 ± 0.0040"
std::string Text(const Estimate& estimate) {
  std::string text = Concat(estimate.mean < 0 ? "" : "+", Fixed(estimate.mean, 4));
  if (estimate.half > 0) Append(text, " ± ", Fixed(estimate.half, 4));
  return text;
}

std::string Share(const Asked& asked) {
  return asked.samples == 0 ? "-" : Concat(asked.right, "/", asked.samples);
}

std::vector<std::string> Titles(const TextPlan& plan) {
  std::vector<std::string> titles = {"policy",  "bytes %",  "Δ nats",  "KL",
                                     "top-1 %", "ms/token", "in cache"};
  if (plan.generate > 0)
    titles.insert(titles.end(), {"generated %", "first other", "generated KL"});
  for (const std::uint32_t needles : plan.needles) {
    for (const Question question : plan.questions) {
      titles.push_back(Concat(needles, needles == 1 ? " needle " : " needles ", NameOf(question)));
    }
  }
  return titles;
}

std::string Milliseconds(double ms) { return ms == 0 ? "-" : Fixed(ms, 1); }

// The yardstick reads all tokens at once, so it has no times.
std::vector<std::string> Row(const TextPlan& plan, const PolicyAt& policy, std::uint32_t length,
                             const TextFigures& figures) {
  std::vector<std::string> row = {policy.For(length) + (figures.not_packed.empty() ? "" : " *")};
  if (figures.texts == 0) {
    row.resize(Titles(plan).size(), "-");
    return row;
  }
  row.insert(row.end(), {Fixed(100 * figures.bytes_kept, 1), Text(figures.difference),
                         Fixed(figures.divergence, 4), Fixed(100 * figures.same_choice, 1),
                         Milliseconds(figures.step_ms), Milliseconds(figures.cache_ms)});
  if (plan.generate > 0) {
    row.insert(row.end(), {Fixed(100 * figures.agreement, 1), Fixed(figures.agreed_until, 0),
                           Fixed(figures.generated_divergence, 4)});
  }
  for (const std::vector<Asked>& by_question : figures.asked) {
    for (const Asked& asked : by_question) row.push_back(Share(asked));
  }
  return row;
}

std::string Heading(const TextPlan& plan, std::uint32_t length, const TextFacts& facts) {
  return Concat(length, " tokens compressed before the rest is known, the next ", plan.read,
                " read through the cache; ", facts.texts.size(), " texts");
}

constexpr char kLegend[] =
    "Δ nats: mean difference of -ln p to exact attention, with its 95 % interval. KL: mean "
    "divergence\nfrom exact attention, in nats per token. top-1: tokens with the same likeliest "
    "token. ms/token: a step\nof one token alone; in cache: of it spent in Tessera. Needles: right "
    "answers of all questions.\ngenerated: tokens as dense generates them; generated KL: "
    "divergence from exact attention over the\nsame text.\n";

constexpr char kYardstick[] =
    "fp8 is a yardstick, not a policy: the model's own cache in e4m3, one scale per lane and side";

// Why policies were refused, and what was left dense.
std::vector<std::string> Notes(const TextResults& results) {
  std::vector<std::string> notes;
  if (results.plan().yardstick().has_value()) notes.emplace_back(kYardstick);
  for (const std::uint32_t length : results.plan().lengths) {
    for (std::size_t policy = 0; policy < results.plan().policies.size(); ++policy) {
      const TextFigures figures = results.Of(policy, length);
      const std::string name =
          Concat(results.plan().policies[policy].For(length), " at ", length, " tokens");
      if (!figures.refused.empty()) {
        notes.push_back(Concat(name, " was refused: ", figures.refused));
      }
      if (!figures.not_packed.empty()) {
        notes.push_back(
            Concat("* ", name, " packed nothing, always or at times: ", figures.not_packed));
      }
    }
  }
  return notes;
}

// Top-1 agreement by bytes kept.
std::string ChartSvg(const TextResults& results, std::uint32_t length) {
  Chart chart = {
      .title = Concat("same likeliest token, ", length, " tokens"),
      .x_title = "bytes kept",
      .ticks = {{0, "0 %"}, {0.25, "25 %"}, {0.5, "50 %"}, {0.75, "75 %"}, {1, "100 %"}}};
  for (std::size_t policy = 0; policy < results.plan().policies.size(); ++policy) {
    const TextFigures figures = results.Of(policy, length);
    if (figures.texts == 0) continue;
    const std::string name = results.plan().policies[policy].For(length);
    chart.lines.push_back(
        {.name = name,
         .colour = kColours[policy % std::size(kColours)],
         .points = {{.x = std::min(1.0, figures.bytes_kept),
                     .share = figures.same_choice,
                     .note =
                         Concat(name, ": ", Fixed(100 * figures.same_choice, 1), " % of tokens, ",
                                Fixed(100 * figures.bytes_kept, 1), " % of the bytes")}},
         .marker = policy});
  }
  return chart.Svg();
}

std::string Legend(const TextResults& results) {
  std::string html = "<ul class=\"legend\">\n";
  for (std::size_t policy = 0; policy < results.plan().policies.size(); ++policy) {
    const char* const colour = kColours[policy % std::size(kColours)];
    Append(html, "<li><svg viewBox=\"0 0 14 14\" stroke=\"", colour, "\" fill=\"", colour, "\">",
           MarkerSvg(policy, 7, 7, ""), "</svg>", Escaped(results.plan().policies[policy].Name()),
           "</li>\n");
  }
  return html + "</ul>\n";
}

std::string HtmlTable(const TextResults& results, std::uint32_t length) {
  std::string html = "<div class=\"scroll\"><table>\n<tr>";
  for (const std::string& title : Titles(results.plan())) {
    Append(html, "<th>", Escaped(title), "</th>");
  }
  html += "</tr>\n";
  for (std::size_t policy = 0; policy < results.plan().policies.size(); ++policy) {
    html += "<tr>";
    for (const std::string& cell :
         Row(results.plan(), results.plan().policies[policy], length, results.Of(policy, length))) {
      Append(html, "<td>", Escaped(cell), "</td>");
    }
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

// Names and values of a policy's figures, for CSV and JSON.
std::vector<std::pair<std::string, double>> ValuesOf(const TextPlan& plan,
                                                     const TextFigures& figures) {
  std::vector<std::pair<std::string, double>> values = {
      {"texts", figures.texts},
      {"bytes_kept", figures.bytes_kept},
      {"difference", figures.difference.mean},
      {"difference_half", figures.difference.half},
      {"divergence", figures.divergence},
      {"same_choice", figures.same_choice},
      {"step_ms", figures.step_ms},
      {"cache_ms", figures.cache_ms}};
  if (plan.generate > 0) {
    values.emplace_back("generated_agreement", figures.agreement);
    values.emplace_back("generated_until", figures.agreed_until);
    values.emplace_back("generated_divergence", figures.generated_divergence);
  }
  for (std::size_t n = 0; n < plan.needles.size(); ++n) {
    for (std::size_t q = 0; q < plan.questions.size(); ++q) {
      const std::string name = Concat("needles", plan.needles[n], "_", NameOf(plan.questions[q]));
      values.emplace_back(name + "_right", figures.asked[n][q].right);
      values.emplace_back(name + "_samples", figures.asked[n][q].samples);
    }
  }
  return values;
}

}  // namespace

std::string TextSummary(const TextResults& results, const TextFacts& facts) {
  std::string text;
  for (const std::uint32_t length : results.plan().lengths) {
    std::vector<Table::Column> columns;
    for (const std::string& title : Titles(results.plan())) columns.push_back({title});
    columns[0].align = Align::kLeft;
    Table table(columns);
    for (std::size_t policy = 0; policy < results.plan().policies.size(); ++policy) {
      table.Add(
          Row(results.plan(), results.plan().policies[policy], length, results.Of(policy, length)));
    }
    Append(text, Heading(results.plan(), length, facts), "\n\n", table.Render(), "\n");
  }
  text += kLegend;
  for (const std::string& note : Notes(results)) Append(text, note, "\n");
  for (const std::string& path : facts.texts) Append(text, "read: ", path, "\n");
  return text;
}

std::string TextPage(const TextResults& results, const TextFacts& facts) {
  std::string html =
      Concat("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n",
             "<title>tessera eval</title>\n<style>", kPageStyle, "</style>\n</head>\n<body>\n",
             "<h1>A language model with a compressed KV cache, by policy</h1>\n");
  Append(html, "<p>", Escaped(facts.version), ", ", Escaped(facts.date), ", ",
         Escaped(facts.machine), ". Model: ", Escaped(facts.model), "; ",
         Fixed(facts.dense_bytes_per_token / 1024, 1), " KiB of K and V a token.</p>\n<p><code>",
         Escaped(facts.command), "</code></p>\n", Legend(results));
  for (const std::uint32_t length : results.plan().lengths) {
    Append(html, "<h2>", Escaped(Heading(results.plan(), length, facts)), "</h2>\n",
           HtmlTable(results, length), "<div class=\"charts\"><figure>", ChartSvg(results, length),
           "</figure></div>\n");
  }
  Append(html, "<p>", Escaped(kLegend), "</p>\n<ul>\n");
  for (const std::string& note : Notes(results)) Append(html, "<li>", Escaped(note), "</li>\n");
  for (const std::string& path : facts.texts) {
    Append(html, "<li>read: <code>", Escaped(path), "</code></li>\n");
  }
  return html + "</ul>\n</body>\n</html>\n";
}

std::string TextCsv(const TextResults& results, const TextFacts& facts) {
  std::string csv;
  for (const std::uint32_t length : results.plan().lengths) {
    for (std::size_t policy = 0; policy < results.plan().policies.size(); ++policy) {
      const TextFigures figures = results.Of(policy, length);
      const auto values = ValuesOf(results.plan(), figures);
      if (csv.empty()) {
        csv = "length,policy,bytes_per_token";
        for (const auto& [name, value] : values) Append(csv, ",", name);
        csv += "\n";
      }
      // A policy's text has commas, never quotes.
      Append(csv, length, ",\"", results.plan().policies[policy].For(length), "\",",
             figures.texts == 0 ? "" : Fixed(figures.bytes_kept * facts.dense_bytes_per_token, 1));
      for (const auto& [name, value] : values) {
        Append(csv, ",", figures.texts == 0 ? std::string() : Concat(value));
      }
      csv += "\n";
    }
  }
  return csv;
}

std::string TextJson(const TextResults& results) {
  std::string text;
  for (const std::uint32_t length : results.plan().lengths) {
    for (std::size_t policy = 0; policy < results.plan().policies.size(); ++policy) {
      const TextFigures figures = results.Of(policy, length);
      Append(text, text.empty() ? "" : ",\n", "{\"length\": ", length,
             ", \"policy\": ", JsonString(results.plan().policies[policy].For(length)));
      for (const auto& [name, value] : ValuesOf(results.plan(), figures)) {
        Append(text, ", \"", name, "\": ", value);
      }
      if (!figures.refused.empty()) Append(text, ", \"refused\": ", JsonString(figures.refused));
      text += "}";
    }
  }
  return Concat("{\"cells\": [\n", text, "\n]}\n");
}

}  // namespace tessera::cli::eval
