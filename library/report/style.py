"""Style sheet of the HTML report."""

STYLE = """
  body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; background: #fafafa; max-width: 1320px; margin: 2em auto;
         padding: 0 1.5em }
  h1 { margin-bottom: .1em }
  h2 { margin-top: 2em; border-bottom: 1px solid #ddd }
  h3 { margin: .4em 0 }
  .facts { color: #556 }
  .charts { display: grid; gap: 1.5em; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)) }
  figure { margin: 0; background: white; border: 1px solid #e3e3e8; border-radius: 6px; padding: .5em }
  svg { width: 100%; height: auto; display: block }
  svg text { font-size: 11px; fill: #667 }
  .grid { stroke: #eee }
  .line { fill: none; stroke-width: 1.8 }
  polyline.faint { fill: none; stroke: #c5cbd6; stroke-width: 1 }
  .colour0, .bar1 { stroke: #c2410c; fill: #c2410c }
  .colour1 { stroke: #1d4ed8 }
  .colour2 { stroke: #047857 }
  .colour3 { stroke: #7e22ce }
  .colour4 { stroke: #b45309 }
  polyline { fill: none !important }
  rect { stroke: none }
  .bar0 { fill: #c5cbd6 }
  .key { margin-right: 1.2em; font-size: 13px }
  .key::before { content: "■ "; color: #c5cbd6 }
  .key.colour0::before, .key.bar1::before { color: #c2410c }
  .key.colour1::before { color: #1d4ed8 }
  .key.colour2::before { color: #047857 }
  .key.colour3::before { color: #7e22ce }
  .key.colour4::before { color: #b45309 }
  table { border-collapse: collapse }
  td, th { padding: .25em .8em; text-align: right; border-bottom: 1px solid #eee }
  td:first-child, th:first-child { text-align: left }
  .previews table { width: 100% }
  .previews td, .previews th { text-align: center; vertical-align: middle; padding: .25em .4em }
  .previews td:first-child { width: 12%; text-align: left }
  .previews img { max-width: 100%; min-width: 72px }
  .previews { overflow-x: auto }
  pre { background: white; border: 1px solid #e3e3e8; padding: 1em; overflow-x: auto;
        font-size: 13px; line-height: 1.35 }
"""
