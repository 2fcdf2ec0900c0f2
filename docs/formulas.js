// Renders formulas by KaTeX (katex/), which is part of the site: nothing is loaded from another server.
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
}
