"""axe-core, and the script that lists its serious findings."""

from support.paths import ROOT

AXE = ROOT / "build/axe/node_modules/axe-core/axe.min.js"
FOUND = """axe.run(document, {resultTypes: ["violations"]}).then((result) => result.violations
    .filter((each) => ["serious", "critical"].includes(each.impact))
    .map((each) => each.id + ": " + each.nodes.map((node) => node.target).join(" ")))"""
