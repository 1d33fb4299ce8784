// The look of report pages.
#pragma once

namespace tessera::cli::eval {

inline constexpr const char* kColours[] = {"#1f77b4", "#d62728", "#2ca02c", "#9467bd",
                                           "#ff7f0e", "#17becf", "#8c564b", "#e377c2",
                                           "#7f7f7f", "#bcbd22", "#003f5c", "#7a5195"};

inline constexpr char kPageStyle[] =
    "body{font:15px/1.45 system-ui,sans-serif;max-width:1320px;margin:2em auto;padding:0 1em;"
    "color:#1a1a1a;background:#fff}"
    ".verdict{font-size:17px}code{overflow-wrap:anywhere}"
    ".scroll{overflow-x:auto}.scroll td,.scroll th{white-space:nowrap}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:13px}"
    "td,th{padding:2px 9px;text-align:right;border-bottom:1px solid #e4e4e4}"
    "td:first-child,th:first-child{text-align:left;font-family:ui-monospace,monospace}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(400px,100%),1fr));"
    "gap:12px}figure{margin:0}figcaption{font-size:13px}"
    "svg text{font:11px system-ui,sans-serif;fill:#333;stroke:none}"
    ".grid{stroke:#e4e4e4}polyline{stroke-width:1.5}.bar{fill:none;opacity:.55}"
    ".front{fill:none;stroke:#333;stroke-width:1.2;stroke-dasharray:5 3}"
    ".legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:4px 18px}"
    ".legend svg{width:14px;height:14px;margin-right:5px;vertical-align:-2px}";

}  // namespace tessera::cli::eval
