// How the page looks: light, dark or as the system is, and whether drafted tokens are marked. Kept in the browser.

import { announce, byId } from "./dom.js";

const LOOK = "eyas.look";
const THEMES = { auto: "◐", light: "☀", dark: "☾" };

export class Look {
  constructor() {
    this.theme = "auto";
    this.marks = true;
    this.load();
    this.apply();
    byId("theme").addEventListener("click", () => {
      const names = Object.keys(THEMES);
      this.theme = names[(names.indexOf(this.theme) + 1) % names.length];
      this.change();
      announce(byId("theme").ariaLabel);
    });
    byId("marks").addEventListener("change", (event) => {
      this.marks = event.target.checked;
      this.change();
    });
  }

  load() {
    try {
      const { theme, marks } = JSON.parse(localStorage.getItem(LOOK)) ?? {};
      if (Object.hasOwn(THEMES, theme)) this.theme = theme;
      if (typeof marks === "boolean") this.marks = marks;
    } catch {
      // not written by this page
    }
  }

  change() {
    localStorage.setItem(LOOK, JSON.stringify({ theme: this.theme, marks: this.marks }));
    this.apply();
  }

  apply() {
    document.documentElement.dataset.theme = this.theme;
    document.body.classList.toggle("unmarked", !this.marks);
    byId("marks").checked = this.marks;
    byId("theme").textContent = THEMES[this.theme];
    byId("theme").ariaLabel = byId("theme").title = `Theme: ${this.theme}`;
  }
}
